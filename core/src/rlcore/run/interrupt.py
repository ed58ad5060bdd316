"""Ctrl-C and SIGTERM: stop where the state is whole, so that a checkpoint can be saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does; outside the main thread, where Python allows no handler, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Take SIGTERM back from what the block starts, whose own handler ends the process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - what signal handlers receive
    raise KeyboardInterrupt


class InterruptGuard:
    """While entered, the first signal ends the block at once, or at the end of a `deferred` part; a second one at once."""

    def __init__(self) -> None:
        self._requested = False
        self._depth = 0
        self.pressed = False
        """True where a signal has arrived."""
        self.torn = False
        """True where a second signal ended a deferred part in its middle, so that the state is not whole."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Take over the signals; outside the main thread, where Python allows none, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._requested = False

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A part that must finish: weights, optimizer, version and metrics change together. May be nested.

        An error that ends the part ends the run as well: it is raised, and a signal that came before is forgotten. A signal
        whose KeyboardInterrupt was lost (Python drops what is raised in a finalizer) ends the block where the next part begins.
        """
        if self._requested and self._depth == 0:
            raise KeyboardInterrupt
        self._depth += 1
        try:
            yield
        except BaseException:
            if self._depth == 1:
                self._requested = False
            raise
        finally:
            self._depth -= 1
        if self._requested and self._depth == 0:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - what signal handlers receive
        again, self._requested = self._requested, True
        self.pressed = True
        if self._depth == 0 or again:
            self.torn = self.torn or self._depth > 0
            raise KeyboardInterrupt

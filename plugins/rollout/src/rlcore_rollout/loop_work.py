"""Work on the environment's event loop, as other threads see it: they begin it, look at it, and run functions beside it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import TypeVar

from rlcore.spi import WorkerError
from rlcore_rollout.environment_calls import POLL_S
from rlcore_rollout.environment_runner import Begin, EpisodeRunner, LoopTaskHandle

T = TypeVar("T")


class LoopWork:
    """Work on the environment's event loop, from its first `drive` until `cancel`, and the error that ended it.

    All that it changes is looked at and changed on the event loop alone while it works, and else in the thread that asks.
    """

    def __init__(self, runner: EpisodeRunner, begin: Begin, on_error: Callable[[], None], now: Callable[[], float]) -> None:
        """`begin` does the work, and calls `at_work` first; `on_error` is called where the work has failed; `now` is the time,
        in seconds, by which the environment's calls have theirs."""
        self._runner = runner
        self._begin = begin
        self._on_error = on_error
        self._now = now
        self._handle: LoopTaskHandle | None = None
        """None before the work begins, and once it has ended."""
        self._begun_on: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        """The error of the work, or of the stream beside it, that was not raised yet."""

    def drive(self) -> None:
        """Have the event loop work."""
        if self._handle is None:
            self.raise_failure()
            self._handle = self._runner.work(self._begin, self._now)
            self._handle.start()
        self._handle.num_stuck = 0

    def call(self, function: Callable[[], T]) -> T:
        """As `between`. Raises what ends the work."""
        result = self.between(function)
        self.raise_failure()
        return result

    def between(self, function: Callable[[], T]) -> T:
        """Run a function on the event loop, or in this thread where no work is under way. An error of the work is kept."""
        while not self.poll(0.0) and (handle := self._handle) is not None:
            future, loop = Future[T](), handle.loop
            with suppress(RuntimeError):  # other work got stuck there, and it was closed: the next poll begins on another
                loop.call_soon_threadsafe(_run_into, future, function)
            while not wait([future], POLL_S).done:
                self.poll(0.0)
                if (self._handle is not handle or handle.loop is not loop) and future.cancel():
                    break  # that event loop was given up, or the work has failed: the function has not run
            else:
                return future.result()
        return function()

    def poll(self, timeout_s: float) -> bool:
        """Return whether there is no work, or it has ended; its error is kept."""
        try:
            if self._handle is not None and not self._handle.poll(timeout_s):
                return False
        except CancelledError:  # the runner was closed, and can be used again
            pass
        except BaseException as error:  # an environment's KeyboardInterrupt too
            self.keep(error)
            self._on_error()
        self._handle = self._begun_on = None
        return True

    def watch(self) -> bool:
        """Raise the error of the work, which is not kept here; else return True."""
        if (handle := self._handle) is not None:  # another thread may end it meanwhile
            handle.poll(0.0)
        return True

    def cancel(self) -> None:
        """End the work where it is: it changes nothing any more when this returns."""
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._begun_on = None

    def at_work(self) -> None:
        """The work has begun on this event loop, so that more can join."""
        self._begun_on = asyncio.get_running_loop()

    @property
    def is_at_work(self) -> bool:
        """Return whether it has begun on the event loop that it is on."""
        return self._handle is not None and self._begun_on is self._handle.loop

    @property
    def has_failed(self) -> bool:
        """Return whether an error was kept that the next `raise_failure` raises."""
        return self._failure is not None

    def keep(self, error: BaseException | None) -> None:
        """Keep an error to be raised, if there is one; first of all one that ends the run."""
        if error is not None and (self._failure is None or isinstance(self._failure, WorkerError)):
            self._failure = error

    def raise_failure(self) -> None:
        """Raise the error that was kept."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


def _run_into(future: "Future[T]", function: Callable[[], T]) -> None:
    """Run a function, unless no one waits for it any longer."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)

"""Work on the environment's event loop, as other threads see it, which begin it, look at it, and run functions on it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

from rlcore.run.rollout.environment_calls import POLL_S
from rlcore.run.rollout.environment_runner import Begin, EpisodeRunner, LoopTaskHandle
from rlcore.spi import WorkerError

T = TypeVar("T")


class LoopWork:
    """Work that begins again whenever there is something to do, and what ended it.

    All that it changes is looked at and changed on the event loop alone, where it is at work, and else in the thread that asks.
    """

    def __init__(self, runner: EpisodeRunner, begin: Begin, on_error: Callable[[], None], now: Callable[[], float]) -> None:
        """`begin` does the work, and calls `at_work` first and `leave` last; `on_error` is called where the work has failed;
        `now` is the time, in seconds, by which the environment's calls have theirs."""
        self._runner = runner
        self._begin = begin
        self._on_error = on_error
        self._now = now
        self._driven: LoopTaskHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop, while it works or is about to."""
        self._is_driven = False
        """Whether it is, or is about to be, at work on all that there is to do."""
        self.is_at_work = False
        """Whether it has begun with that, so that more can join."""
        self._failure: BaseException | None = None
        """What ended the work, or the stream beside it, and was not raised yet."""

    # In other threads.

    def drive(self, *, has_more: bool) -> None:
        """Have the event loop work; anew where it has ended or is ending, and `has_more` to do."""
        if self._driven is None or (not self._is_driven and has_more):
            self._await_end()  # the work before has ended, but for its last lines
            self.raise_failure()
            self._is_driven = True
            self._loop = self._runner.thread().loop  # before there is anything on it that sets it to None at its end
            self._driven = self._runner.work(self._begin, self._now)
            self._driven.start()
        self._driven.num_stuck = 0

    def call(self, function: Callable[[], T]) -> T:
        """As `between`. Raises what ends the work."""
        result = self.between(function)
        self.raise_failure()
        return result

    def between(self, function: Callable[[], T]) -> T:
        """What a function returns on the event loop, or in this thread where none is at work. What ends the work is kept."""
        while self._driven is not None and (loop := self._loop) is not None:
            future: Future[T] = Future()
            with suppress(RuntimeError):  # other work got stuck there, and it was closed: the next poll begins on another
                loop.call_soon_threadsafe(_run_into, future, function)
            while not wait([future], POLL_S).done:
                self.poll(0.0)
                if self._loop is not loop and future.cancel():
                    break  # that event loop was given up, or has no work left: the function has not run
            else:
                return future.result()
        self._await_end()
        return function()

    def poll(self, timeout_s: float) -> bool:
        """Whether there is no work, or it has ended; what ended it is kept."""
        try:
            return self._driven is None or self._driven.poll(timeout_s)
        except BaseException as error:  # an environment's KeyboardInterrupt too
            self.keep(error)
            self._on_error()
            return True

    def watch(self) -> bool:
        """Raise what ended the work, which nobody keeps here; else return True."""
        if self._driven is not None:
            self._driven.poll(0.0)
        return True

    def cancel(self) -> None:
        """End the work where it is: it changes nothing any more when this returns."""
        if self._driven is not None:
            self._driven.cancel()
            self._driven = self._loop = None
            self._is_driven = self.is_at_work = False

    @property
    def has_failed(self) -> bool:
        """Whether something has that the next `raise_failure` raises."""
        return self._failure is not None

    def keep(self, error: BaseException | None) -> None:
        """Keep an error to be raised, if there is one; first of all one that ends the run."""
        if error is not None and (self._failure is None or isinstance(self._failure, WorkerError)):
            self._failure = error

    def raise_failure(self) -> None:
        """Raise what was kept."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _await_end(self) -> None:
        """Wait for the end of work that has none left, or has failed."""
        while not self.poll(POLL_S):
            pass

    # On the event loop.

    def at_work(self) -> None:
        """The work begins on this event loop."""
        self._loop, self._is_driven, self.is_at_work = asyncio.get_running_loop(), True, True

    def rest(self) -> None:
        """Nothing is left to do; what there is from now on is for the next."""
        self._is_driven = self.is_at_work = False

    def leave(self) -> None:
        """The work ends on this event loop."""
        if self._loop is asyncio.get_running_loop():  # else it was given up, and the work goes on on another
            self._loop, self._is_driven, self.is_at_work = None, False, False


def _run_into(future: "Future[T]", function: Callable[[], T]) -> None:
    """Run a function, unless no one waits for it any longer."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)

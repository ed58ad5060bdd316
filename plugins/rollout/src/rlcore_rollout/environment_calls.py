"""Calls of one environment on an event loop: each within its time, and what fails is an outcome."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Mapping
from contextlib import suppress
from types import CoroutineType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from attrs import define, field

from rlcore.spi import ContractError, EpisodeResult, FailureKind, ResetResult, StepResult
from rlcore_rollout.environment_results import Failure
from rlcore_rollout.event_loop import Abandoned
from rlcore_rollout.slowest_calls import SlowestCalls

GRACE_S = 2.0
"""Seconds past the time limit after which a call that neither ends nor lets itself be cancelled counts as stuck."""
POLL_S = 0.05
TURN_S = 0.002
"""Seconds that calls which never wait may run before others that did wait go on."""

Work: TypeAlias = Callable[[Any], Coroutine[Any, Any, None]]
_Piece: TypeAlias = tuple[Work, Any, int]
"""Work, what it is given, and its order."""
Result = TypeVar("Result", ResetResult, StepResult, EpisodeResult)


@define(kw_only=True, eq=False)  # one for each turn, which frozen would cost more than twice the time
class Call(Generic[Result]):
    """One call of a function of the environment."""

    key: Hashable
    """Names it among all that are under way; the same when it is made again on another event loop."""
    function: Literal["reset", "step", "run"]
    start: Callable[[], Awaitable[Any]]
    check: "Callable[[Any], Result | Failure]"
    describe: Callable[[], str]
    """Which episode it is of, in words."""


@define(kw_only=True, eq=False)
class EnvironmentCalls:
    """The calls under way on one event loop. Each is made in a task of its caller's, who makes one call after another: a task
    a call would cost more than most calls do."""

    timeout_s: float
    given_up: Mapping[Hashable, Failure] = field(factory=dict)
    """Calls that got stuck on an earlier event loop, by their keys: they are not made again."""
    uncancellable: list[Call[Any]] = field(factory=list)
    """Calls that were cancelled and go on."""
    unwanted: set[Hashable] = field(factory=set)
    """The keys of calls that were given up: what they come to matters to no one."""
    now: Callable[[], float] = time.monotonic
    """The time in seconds by which calls have theirs."""
    slowest: SlowestCalls = field(factory=SlowestCalls)
    heartbeats: int = 0
    """Grows while the event loop turns."""
    is_over: bool = False
    """True where the work has ended or its event loop is given up: no further call may start."""
    give_way_at: float = 0.0
    work: "asyncio.Task[Any] | None" = None
    """The task that makes the calls, once it has begun."""
    _running: dict["asyncio.Task[Any]", tuple[Call[Any], float]] = field(factory=dict)
    _cancelled: set["asyncio.Task[Any]"] = field(factory=set)

    def begin(self) -> None:
        """The present task is the work that makes them."""
        self._require_going_on()
        self.work = asyncio.current_task()

    def end(self) -> None:
        """Cancel that work, if it has begun; once, however often this is called."""
        work, self.work = self.work, None
        if work is not None:
            work.cancel()

    async def make(self, call: Call[Result]) -> "Result | Failure":
        """Make a call, and return its result or failure."""
        if self.given_up and call.key in self.given_up:
            return self.given_up[call.key]
        task = asyncio.current_task()
        assert task is not None
        self._require_going_on()
        started_at = self.now()
        self._running[task] = (call, started_at)
        outcome: Result | Failure
        try:
            try:
                started = call.start()
                outcome = call.check(await (started if type(started) is CoroutineType else _awaitable(started)))
            except BaseException as error:  # a panic in a native library is no Exception
                if self._ends_caller(error, task):
                    raise
                outcome = Failure.of(error)
            if (seconds := self.now() - started_at) > self.slowest.least_s:
                self.slowest.add(seconds, call.function, call.describe)
            if self._cancelled and task in self._cancelled and not (isinstance(outcome, Failure) and outcome.interrupts):
                self._cancelled.discard(task)
                task.uncancel()
                outcome = Failure(reason=self._late, kind=_late_kind(call, outcome))
            elif seconds > self.timeout_s and not isinstance(outcome, Failure):
                # What it came to after its time counts no more than that of a call which could be cancelled.
                outcome = Failure(
                    reason=f"{self._late}, and the event loop could not end it: a call blocks that does not await"
                )
        finally:
            del self._running[task]
        if self.is_over:
            raise asyncio.CancelledError  # another event loop makes the call again
        self.heartbeats += 1
        return outcome

    async def give_way(self) -> None:
        """Let other tasks go on, where calls that never wait have kept them from it for a while."""
        if time.monotonic() > self.give_way_at:
            await self.others()
            self.give_way_at = time.monotonic() + TURN_S

    async def others(self) -> None:
        """Let other tasks go on."""
        await asyncio.sleep(0)
        self._require_going_on()

    def give_up(self, keys: Collection[Hashable]) -> None:
        """Cancel the calls of these keys, whatever they come to."""
        for task, (call, _) in self._running.items():
            if call.key in keys and task not in self._cancelled:
                self._cancelled.add(task)
                self.unwanted.add(call.key)
                task.cancel()

    async def watch(self) -> None:
        """Cancel calls whose time is up, until this is cancelled itself."""
        while True:
            await asyncio.sleep(min(self.timeout_s / 4, POLL_S))
            self.heartbeats += 1
            now = self.now()
            for task, (call, started) in list(self._running.items()):
                if now - started <= self.timeout_s:
                    break  # a dict keeps the order of insertion: all others started later
                if task not in self._cancelled:
                    self._cancelled.add(task)
                    task.cancel()
                elif now - started > self.timeout_s + GRACE_S:
                    self.uncancellable.append(call)

    def is_executing(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether the loop is executing the code of a call."""
        return asyncio.current_task(loop) in self._running

    def executing(self, loop: asyncio.AbstractEventLoop) -> list[Call[Any]]:
        """The call whose code the loop is executing; all in flight where it executes none of them."""
        current = asyncio.current_task(loop)
        running = dict(self._running)
        return [call for task, (call, _) in running.items() if current not in running or task is current]

    @property
    def _late(self) -> str:
        return f"took longer than {self.timeout_s:g} s (rollout.environment_timeout_s)"

    def _require_going_on(self) -> None:
        if self.is_over:
            raise asyncio.CancelledError

    def _ends_caller(self, error: BaseException, task: "asyncio.Task[Any]") -> bool:
        """Return whether a call's error is not the environment's, but ends who made the call."""
        if isinstance(error, asyncio.CancelledError):
            return bool(task.cancelling()) and task not in self._cancelled
        return self.is_over and isinstance(error, (Abandoned, GeneratorExit))


def _late_kind(call: Call[Any], outcome: object) -> FailureKind:
    """Return how an episode failed by its time limit: as the block of `fails_as` says that the limit ended. Of an agent's whole
    episode it is a limit otherwise."""
    kind = outcome.kind if isinstance(outcome, Failure) else "environment"
    return "limit" if kind == "environment" and call.function == "run" else kind


def _awaitable(value: Any) -> Awaitable[Any]:
    if not hasattr(value, "__await__"):
        raise ContractError(f"returned {type(value).__name__} at once; expected an awaitable: write it as `async def`")
    awaitable: Awaitable[Any] = value
    return awaitable


class TaskPool:
    """Tasks that take pieces of work from one queue, in the order in which they come: so many are under way at once.

    A task for each piece would cost more than most calls of an environment do."""

    def __init__(self) -> None:
        self._is_held = False
        self.begin()

    def begin(self) -> None:
        """Reset the pool for another event loop. Work that has not begun is dropped."""
        self._queue: asyncio.Queue[_Piece] = asyncio.Queue()
        self._may_begin, self._ended = asyncio.Event(), asyncio.Event()
        self._at_work: set[asyncio.Task[Any]] = set()
        self._errors: list[tuple[int, BaseException]] = []
        """Each with the order of the work that raised it."""
        if not self._is_held:
            self._may_begin.set()

    def add(self, work: Work, item: Any = None, order: int = 0) -> None:
        """Queue `work(item)`. Of errors that several pieces raise at once, `run` raises that of the lowest order."""
        piece = (work, item, order)
        self._queue.put_nowait(piece)

    def close(self) -> None:
        """End the pool: drop queued work and cancel work that has begun."""
        self._ended.set()

    def fail(self, error: BaseException, order: int = 0) -> None:
        """Let `run` raise an error, and cancel work that has begun."""
        self._errors.append((order, error))
        self._ended.set()

    def hold(self) -> None:
        """Begin no work until `release`. Work that has begun goes on."""
        self._is_held = True
        self._may_begin.clear()

    def release(self) -> None:
        """Begin queued work again."""
        self._is_held = False
        with suppress(RuntimeError):  # raised for workers that wait on an event loop that is closed
            self._may_begin.set()

    @property
    def is_at_work(self) -> bool:
        """Return whether work has begun and not ended."""
        return bool(self._at_work)

    async def run(self, calls: EnvironmentCalls, num_tasks: int) -> None:
        """Run work until `close`. The first error of a piece of work ends the others and is raised."""
        # A task may begin once this event loop is given up and the pool is another's: it has this one's queue all the same.
        parts = self._queue, self._may_begin, self._ended, self._at_work
        tasks = [asyncio.create_task(self._work(calls, *parts)) for _ in range(num_tasks)]
        try:
            await self._ended.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=GRACE_S)
        if self._errors:
            # What ends the process comes before errors.
            raise min(self._errors, key=lambda one: (isinstance(one[1], Exception), one[0]))[1]

    async def _work(
        self,
        calls: EnvironmentCalls,
        queue: "asyncio.Queue[_Piece]",
        may_begin: asyncio.Event,
        ended: asyncio.Event,
        at_work: "set[asyncio.Task[Any]]",
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            work, item, order = await queue.get()
            if not may_begin.is_set():
                await may_begin.wait()
            if calls.is_over:
                return  # another event loop has its own queue
            at_work.add(task)
            try:
                await work(item)
            except BaseException as error:
                if calls.is_over or isinstance(error, (asyncio.CancelledError, GeneratorExit)):
                    raise  # the pool is another event loop's by now, or ends
                self.fail(error, order)
                return
            finally:
                at_work.discard(task)
            del work, item  # what an episode has said is large, and a task may be idle for long
            if ended.is_set():
                return  # the environment may have caught the cancellation
            if time.monotonic() > calls.give_way_at:
                await calls.give_way()

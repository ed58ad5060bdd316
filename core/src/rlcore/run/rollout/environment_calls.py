"""Calls of one environment on an event loop: each within its time, and what fails is an outcome."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Mapping, Sequence
from operator import itemgetter
from types import CoroutineType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from attrs import define, field, frozen

from rlcore.run.rollout.event_loop import Abandoned
from rlcore.run.rollout.failures import Failure
from rlcore.spi import ContractError, EpisodeResult, ResetResult, StepResult

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
    check: Callable[[Any], Result]
    describe: Callable[[], str]
    """Which episode it is of, in words."""


@frozen(kw_only=True, eq=False)
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
    state: "_State" = field(factory=lambda: _State())
    _running: dict["asyncio.Task[Any]", tuple[Call[Any], float]] = field(factory=dict)
    _cancelled: set["asyncio.Task[Any]"] = field(factory=set)

    def begin(self) -> None:
        """The present task is the work that makes them."""
        self._require_going_on()
        self.state.work = asyncio.current_task()

    def end(self) -> None:
        """Cancel that work, if it has begun; once, however often this is called."""
        work, self.state.work = self.state.work, None
        if work is not None:
            work.cancel()

    async def make(self, call: Call[Result]) -> "Result | Failure":
        """What a call came to."""
        if self.given_up and call.key in self.given_up:
            return self.given_up[call.key]
        task, state = asyncio.current_task(), self.state
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
            if self._cancelled and task in self._cancelled and not (isinstance(outcome, Failure) and outcome.interrupts):
                self._cancelled.discard(task)
                task.uncancel()
                outcome = Failure(reason=self._late)
            elif self.now() - started_at > self.timeout_s and not isinstance(outcome, Failure):
                # What it came to after its time counts no more than that of a call which could be cancelled.
                outcome = Failure(
                    reason=f"{self._late}, and the event loop could not end it: a call blocks that does not await"
                )
        finally:
            del self._running[task]
        if state.over:
            raise asyncio.CancelledError  # another event loop makes the call again
        state.heartbeats += 1
        return outcome

    async def give_way(self) -> None:
        """Let other tasks go on, where calls that never wait have kept them from it for a while."""
        if time.monotonic() > self.state.give_way_at:
            await self.others()
            self.state.give_way_at = time.monotonic() + TURN_S

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
            self.state.heartbeats += 1
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
        if self.state.over:
            raise asyncio.CancelledError

    def _ends_caller(self, error: BaseException, task: "asyncio.Task[Any]") -> bool:
        """Return whether a call's error is not the environment's, but ends who made the call."""
        if isinstance(error, asyncio.CancelledError):
            return bool(task.cancelling()) and task not in self._cancelled
        return self.state.over and isinstance(error, (Abandoned, GeneratorExit))


class _State:
    """What changes while calls are made."""

    def __init__(self) -> None:
        self.heartbeats = 0
        """Grows while the event loop turns."""
        self.over = False
        """Set where the work ends or its event loop is given up: no further call may start."""
        self.give_way_at = 0.0
        self.work: asyncio.Task[Any] | None = None
        """The task that makes the calls, once it has begun."""


def _awaitable(value: Any) -> Awaitable[Any]:
    if not hasattr(value, "__await__"):
        raise ContractError(f"returned {type(value).__name__} at once; expected an awaitable: write it as `async def`")
    awaitable: Awaitable[Any] = value
    return awaitable


class FirstFailure(Exception):
    """Ends a batch of calls; the failure is among its outcomes."""


async def all_or_first(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines to their end. The first error that one raises cancels the others and is raised, unless it only ends
    them."""
    tasks = [asyncio.create_task(one) for one in work]
    if not tasks:
        return
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ended, _ = await asyncio.wait(tasks, timeout=GRACE_S)
    for error in [task.exception() for task in tasks if task in ended and not task.cancelled()]:
        if error is not None and not isinstance(error, FirstFailure):
            raise error


class TaskPool:
    """Tasks that take pieces of work from one queue, in the order in which they come: so many are under way at once.

    A task for each piece would cost more than most calls of an environment do."""

    def __init__(self) -> None:
        self._held: list[_Piece] | None = None
        """Pieces that came while none may begin; None while they may."""
        self.begin()

    def begin(self) -> None:
        """Reset the pool for another event loop. Work that has not begun is dropped."""
        self._queue: asyncio.Queue[_Piece] = asyncio.Queue()
        self._held = None if self._held is None else []
        self._living: set[asyncio.Task[Any]] = set()
        self._at_work: set[asyncio.Task[Any]] = set()
        self._errors: list[tuple[int, BaseException]] = []
        """Errors that work raised, each with its `order`."""
        self._error: BaseException | None = None
        self._is_closed = False

    def add(self, work: Work, item: Any = None, order: int = 0) -> None:
        """Queue `work(item)`. Of errors that several pieces raise at once, `run` raises that of the lowest order."""
        piece = (work, item, order)
        if self._held is None:
            self._queue.put_nowait(piece)
        else:
            self._held.append(piece)

    def close(self) -> None:
        """End the pool: drop queued work and cancel work that has begun."""
        self._is_closed = True
        for task in self._living - {_current_task()}:
            task.cancel()

    def fail(self, error: BaseException) -> None:
        """Let `run` raise an error, and cancel work that has begun."""
        self._error = self._error or error
        self.close()

    def hold(self) -> None:
        """Begin no work until `release`. Work that has begun goes on."""
        self._held = self._held or []
        while not self._queue.empty():
            self._held.append(self._queue.get_nowait())

    def release(self) -> None:
        """Begin queued work again."""
        pieces, self._held = self._held or [], None
        for piece in pieces:
            self.add(*piece)

    @property
    def is_at_work(self) -> bool:
        """Return whether work has begun and not ended."""
        return bool(self._at_work)

    async def run(self, calls: EnvironmentCalls, num_tasks: int) -> None:
        """Run work until `close`. The first error of a piece of work ends the others and is raised."""
        raised: BaseException | None = None
        try:
            await all_or_first([self._work(calls) for _ in range(num_tasks)])
        except BaseException as error:
            raised = error
        if self._errors and raised is not None:
            raised = min(self._errors, key=itemgetter(0))[1]
        if (raised := raised or self._error) is not None:
            raise raised

    async def _work(self, calls: EnvironmentCalls) -> None:
        task, queue, state, at_work = asyncio.current_task(), self._queue, calls.state, self._at_work
        assert task is not None
        self._living.add(task)
        while not (self._is_closed or state.over):  # the rest is for tasks of another event loop
            work, item, order = await queue.get()
            if self._is_closed or state.over:
                self._queue.put_nowait((work, item, order))  # for a task of the event loop that took over
                return
            at_work.add(task)
            try:
                await work(item)
            except Exception as error:
                self._errors.append((order, error))
                raise
            finally:
                at_work.discard(task)
            del work, item  # what an episode has said is large, and a task may be idle for long
            if time.monotonic() > state.give_way_at:
                await calls.give_way()


def _current_task() -> "asyncio.Task[Any] | None":
    """The task that runs in this thread; None outside of event loops."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None

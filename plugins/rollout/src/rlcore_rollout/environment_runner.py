"""Runs an environment's episodes: many calls at once, each within its time, and what fails ends the run or is masked."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

from rlcore.registry.plugin_errors import attributed, in_time
from rlcore.spi import (
    AgentEnvironment,
    ContractError,
    Environment,
    EpisodeResult,
    ResetResult,
    RewardError,
    Row,
    SessionEndpoint,
    StepResult,
    Turn,
)
from rlcore_rollout import environment_calls
from rlcore_rollout.environment_calls import POLL_S, Call, EnvironmentCalls, Result, TaskPool
from rlcore_rollout.environment_results import Failure, check_episode, check_reset, check_step, shown
from rlcore_rollout.event_loop import LoopThread
from rlcore_rollout.slowest_calls import SlowestCalls

Begin: TypeAlias = Callable[[EnvironmentCalls], Coroutine[Any, Any, None]]
"""A coroutine function of the event loop, which gets the calls that it may make there."""
MAX_CONCURRENT = 256
"""Calls in flight at once; one that waits for its place is not yet on the clock."""
LONG_S = 1.0
"""Seconds between two looks at an event loop in which the whole process may have stood still."""
MAX_STUCK = 8
"""Stuck calls in one batch after which even masking gives up: each costs the time limit and a fresh event loop."""


class EpisodeRunner:
    """Calls one environment from a background event loop.

    An environment that computes for long, or runs code it does not trust, should do so in a process of its own. One that
    blocks the event loop is noticed and given up, unless it holds Python's global lock too: that nothing in the process
    can notice.
    """

    def __init__(
        self,
        environment: Environment | AgentEnvironment,
        timeout_s: float,
        on_error: Literal["error", "mask"] = "error",
        owner: str = "environment",
        max_concurrent: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`max_concurrent` is what its provider says of the same name. Its tokens are below `vocab_size`, if that is known."""
        self.timeout_s = timeout_s
        self.max_concurrent = MAX_CONCURRENT if max_concurrent is None else min(max_concurrent, MAX_CONCURRENT)
        self._environment: Any = environment
        self.owner = owner
        """What messages call the environment."""
        self._on_error = on_error
        self.vocab_size = vocab_size
        self.slowest = SlowestCalls()
        self._thread: LoopThread | None = None
        self._at_work: WeakSet[LoopTaskHandle] = WeakSet()

    @property
    def masks_failures(self) -> bool:
        """Return whether the recipe masks the samples that the environment fails on; else the first of them ends the run."""
        return self._on_error == "mask"

    def reset_all(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[ResetResult | Failure]:
        """Begin an episode on each row. RewardError for the first that fails, or a Failure in its place where masked.

        Masked or not, ContractError where the environment returns something else than the interface says, and what it raises
        itself of DataError (the row is wrong), PluginError (it cannot work here), ConfigError, ModelError, StorageError,
        WorkerError (a process of its own has died) and KeyboardInterrupt: none of them is the fault of one episode."""
        if len(rows) != len(seeds):
            raise ContractError(f"reset_all: found {len(rows)} rows and {len(seeds)} seeds; expected as many of each")
        return self._all([self.reset(rows[index], int(seeds[index]), (index, len(rows))) for index in range(len(rows))])

    def step_all(self, states: Sequence[Any], turns: Sequence[Turn]) -> list[StepResult | Failure]:
        """Answer a turn of each episode. Errors as in reset_all; a reward that is not finite counts as a failure."""
        if len(states) != len(turns):
            raise ContractError(f"step_all: found {len(states)} states and {len(turns)} turns; expected as many of each")
        return self._all([self.step(states[index], turns[index], (index, len(turns))) for index in range(len(turns))])

    def reset(self, row: Row, seed: int, place: tuple[int, int], key: Hashable = None) -> "Call[ResetResult]":
        """The call that begins an episode; `place`: its number, and of how many. `key` names it where numbers do not."""
        return Call(
            key=("reset", place[0] if key is None else key),
            function="reset",
            start=lambda: self._environment.reset(_own_row(row), seed),
            check=lambda result: check_reset(result, self.vocab_size),
            describe=lambda: f"episode {place[0]} of {place[1]} (row {shown(row, 160)})",
        )

    def step(self, state: Any, turn: Turn, place: tuple[int, int], key: Hashable = None) -> "Call[StepResult]":
        """The call that answers an episode's turn; `place` and `key` as in `reset`."""
        return Call(
            key=("step", place[0] if key is None else key),
            function="step",
            start=lambda: self._environment.step(state, turn),
            check=lambda result: check_step(result, self.vocab_size, len(turn.text)),
            describe=lambda: (
                f"episode {place[0]} of {place[1]} "
                f"(response {shown(turn.text, 120)} to the task with state {shown(state, 120)})"
            ),
        )

    def run(
        self, row: Row, seed: int, session: Callable[[], SessionEndpoint], place: tuple[int, int], key: Hashable
    ) -> "Call[EpisodeResult]":
        """The call that runs a whole episode of an AgentEnvironment, with the session that is opened when it begins; `place`
        and `key` as in `reset`."""
        return Call(
            key=key,
            function="run",
            start=lambda: self._environment.run(_own_row(row), seed, session()),
            check=check_episode,
            describe=lambda: f"episode {place[0]} of {place[1]} (row {shown(row, 160)})",
        )

    def work(self, begin: Begin, now: Callable[[], float] = time.monotonic) -> "LoopTaskHandle":
        """`begin(calls)` as work whose `start` begins it on the event loop. Where a call gets stuck, the event loop is given up
        with all that is on it; `begin` is then called again for another, where that call is a failure, and goes on from where
        the rest is. `now` is the time in seconds by which calls have theirs."""
        driven = LoopTaskHandle(self, begin, now)
        self._at_work.add(driven)
        return driven

    def drive(self, begin: Begin) -> None:
        """Run `begin(calls)` on the event loop to its end."""
        driven = self.work(begin)
        try:
            driven.start()
            while not driven.poll(POLL_S):
                pass
        except BaseException:
            driven.cancel()
            raise

    def require(self, call: Call[Any], failure: Failure) -> None:
        """Raise what the recipe does not let pass."""
        if failure.interrupts:
            raise KeyboardInterrupt from failure.error
        if failure.is_final:
            raise failure.final_error(self._where(call)) from failure.error
        if self._on_error == "error" and not failure.is_returned:
            remedy = 'Correct the environment or the row, or leave such samples out: rollout.on_environment_error = "mask"'
            raise RewardError(f"{self.message(call, failure)}. {remedy}") from failure.error

    def message(self, call: Call[Any], failure: Failure) -> str:
        """A failure, with the environment and the episode that it is of."""
        return f"{self._where(call)}, {failure.reason}"

    def executing(self, loop: asyncio.AbstractEventLoop) -> "LoopTaskHandle | None":
        """The work of which the event loop is executing a call; None where it executes none."""
        return next((driven for driven in list(self._at_work) if driven.calls.is_executing(loop)), None)

    def thread(self) -> LoopThread:
        """The background thread, started where there is none."""
        if self._thread is None:
            self._thread = LoopThread()
        return self._thread

    def abandon(self) -> None:
        """Give the background thread up, which is stuck."""
        if self._thread is not None:
            self._thread.abandon()
            self._thread = None

    def close(self) -> None:
        """End the background thread, and what the environment has started. The runner can be used again and then starts another
        thread. PluginError where the environment's `close` does not return."""
        close = getattr(self._environment, "close", None)
        try:
            if close is not None:  # while the event loop turns, which has its connections
                with attributed("raised in close of", self.owner), in_time(f"close of {self.owner}"):
                    close()
        finally:
            if self._thread is not None:
                self._thread.close()
                self._thread = None

    def _where(self, call: Call[Any]) -> str:
        return f"{self.owner}.{call.function}, {call.describe()}"

    def _all(self, calls: Sequence[Call[Result]]) -> list[Result | Failure]:
        """Return the result or failure of each call; with the first failure that the recipe does not let pass, the rest is not
        made."""
        outcomes: dict[int, Result | Failure] = {}
        pool = TaskPool()

        async def begin(made: EnvironmentCalls) -> None:
            if len(outcomes) == len(calls):  # the last came as the event loop before this one was given up
                return

            async def make(index: int) -> None:
                outcome = await made.make(calls[index])
                if isinstance(outcome, Failure):
                    self.require(calls[index], outcome)
                outcomes[index] = outcome
                if len(outcomes) == len(calls):
                    pool.close()

            pool.begin()
            for index in range(len(calls)):
                if index not in outcomes:
                    pool.add(make, index, index)
            await pool.run(made, min(self.max_concurrent, len(calls)))

        if calls:
            self.drive(begin)
        return [outcomes[index] for index in range(len(calls))]


class LoopTaskHandle:
    """Work on the event loop, as the threads that wait for it see it."""

    def __init__(self, runner: EpisodeRunner, begin: Begin, now: Callable[[], float]) -> None:
        self._runner = runner
        self._begin = begin
        self._now = now
        self._given_up: dict[Hashable, Failure] = {}
        self.num_stuck = 0
        """Calls that got stuck since it was last set to 0."""
        self._thread = runner.thread()
        self.calls = self._new_calls()
        """The calls on the present event loop."""
        self._future: Future[None] | None = None
        self._is_cancelled = False
        self._seen = 0
        self._quiet_s = 0.0
        self._polled = 0.0
        self._polling = threading.Lock()
        """Held while a thread looks: the event loop is given up once, and begins again once."""

    def _new_calls(self) -> EnvironmentCalls:
        runner = self._runner
        return EnvironmentCalls(timeout_s=runner.timeout_s, given_up=self._given_up, now=self._now, slowest=runner.slowest)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the work is on, or is about to begin on."""
        return self._thread.loop

    def start(self) -> None:
        """Begin the work on the event loop that the runner has now. Nothing of it goes on where this is interrupted."""
        runner = self._runner
        try:
            self._future = None
            self.calls = self._new_calls()
            self._thread = runner.thread()
            if self._is_cancelled:  # by another thread, in whose sight were those before
                self.calls.is_over = True
            self._seen, self._quiet_s, self._polled = 0, 0.0, time.monotonic()
            self._future = self._thread.submit(_watched(self.calls, self._begin))
        except BaseException:
            self.cancel()
            raise

    def poll(self, timeout_s: float) -> bool:
        """Return whether the work has ended, within the time. Raises what it raised; RewardError where too many calls got
        stuck. From any thread, as seldom as it likes.

        A long time between two polls counts from the next one on: a process that was stopped and continued must not find all
        its calls overdue."""
        with self._polling:
            if self._future is None:
                if self._is_cancelled:
                    raise CancelledError
                return False  # another thread is about to begin it
            if self._thread.ends(self._future, timeout_s):
                self._require_completed(self._future)
                return True
            if self._thread is not self._runner.thread():  # other work on it got stuck, and took this one's event loop along
                self.calls.is_over = True
                self.start()
                return False
            calls, now = self.calls, time.monotonic()
            passed_s = now - self._polled
            before_s, self._quiet_s = (
                (self._quiet_s, self._quiet_s + passed_s) if calls.heartbeats == self._seen else (0.0, 0.0)
            )
            self._seen, self._polled = calls.heartbeats, now
            if self._is_blocked(self._quiet_s if passed_s < LONG_S else before_s) or self.calls.uncancellable:
                self._give_up()
                self.start()
            return False

    def _require_completed(self, future: Future[None]) -> None:
        """Raise what the work raised. RewardError where the environment's code cancelled it, such as by `asyncio.all_tasks`."""
        try:
            future.result()
        except CancelledError as error:
            if self._is_cancelled:
                raise
            raise RewardError(
                f"code of the {self._runner.owner} cancelled tasks of its event loop that are not its own; expected it to "
                "cancel those alone that it created"
            ) from error

    def _is_blocked(self, quiet_s: float) -> bool:
        """Return whether the event loop has not answered for too long: for the limit of a call, while it executes one."""
        limit_s = self.calls.timeout_s
        if quiet_s > limit_s + environment_calls.GRACE_S:
            return True
        return quiet_s > limit_s and self._runner.executing(self._thread.loop) is not None

    def cancel(self) -> None:
        """Let the work end where it is: it changes nothing any more when this returns."""
        self._is_cancelled = True
        self.calls.is_over = True
        passed = threading.Event()
        with contextlib.suppress(RuntimeError):  # an event loop that is closed does nothing
            if self._future is not None:
                self._future.cancel()
            else:  # interrupted as it began
                self._thread.loop.call_soon_threadsafe(self.calls.end)
            self._thread.loop.call_soon_threadsafe(passed.set)  # behind the call or callback that runs at this moment
            passed.wait(environment_calls.GRACE_S)

    def _give_up(self) -> None:
        """Give the event loop up and name the call that holds it, which may be of other work on it."""
        at_fault = self if self.calls.uncancellable else self._runner.executing(self._thread.loop) or self
        culprits = self.calls.uncancellable or at_fault.calls.executing(self._thread.loop)
        limit, where = f"{self.calls.timeout_s:g} s (rollout.environment_timeout_s)", self._thread.where()
        self.calls.is_over = True
        self._runner.abandon()
        reason = f"neither returned nor let itself be cancelled within {limit}; the event loop is {where}"
        if not culprits:
            raise RewardError(f"the environment's event loop has been blocked for {limit} by none of its calls; it is {where}")
        at_fault._given_up |= {call.key: Failure(reason=reason) for call in culprits}
        at_fault.num_stuck += len(culprits)
        if at_fault is not self:
            return  # the other work finds that, once its own thread looks
        for call in culprits:
            if not self._runner.masks_failures and call.key not in self.calls.unwanted:
                self._runner.require(call, self._given_up[call.key])
        if self.num_stuck > MAX_STUCK:
            what = self._runner.message(culprits[0], self._given_up[culprits[0].key])
            raise RewardError(f"{what}. More than {MAX_STUCK} calls got stuck like this one: correct the environment")


async def _watched(calls: EnvironmentCalls, begin: Begin) -> None:
    """Run the work and a watch over its calls. When the work ends, the rest of both is cancelled. An error of the watch ends
    both."""
    calls.begin()
    watch = asyncio.create_task(calls.watch())
    watch.add_done_callback(lambda done: None if done.cancelled() else calls.end())
    try:
        await begin(calls)
    finally:
        calls.is_over = True
        watch.cancel()
        await asyncio.wait([watch], timeout=environment_calls.GRACE_S)
        if watch.done() and not watch.cancelled() and (error := watch.exception()) is not None:
            raise error


def _own_row(row: Row) -> Row:
    """A copy for one call, down to its last table and list: what an environment appends to a row's messages would be in every
    later episode on the row."""
    return {name: _own(value) for name, value in row.items()}


def _own(value: Any) -> Any:
    if type(value) is dict:
        return {name: _own(part) for name, part in value.items()}
    if type(value) is list:
        return [_own(part) for part in value]
    return value

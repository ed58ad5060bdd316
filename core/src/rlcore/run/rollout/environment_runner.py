"""Runs an environment's episodes: many calls at once, each within its time, and what fails ends the run or is masked."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

from attrs import frozen

from rlcore.run.rollout.environment_results import check_reset, check_step
from rlcore.run.rollout.episode_failure import Failure, shown
from rlcore.run.rollout.event_loop import Abandoned, LoopThread
from rlcore.spi import ContractError, Environment, ResetResult, RewardError, Row, StepResult, Turn

MAX_CONCURRENT = 256
"""Calls in flight at once; one that waits for its place is not yet on the clock."""
GRACE_S = 2.0
"""Seconds past the time limit after which a call that neither ends nor lets itself be cancelled counts as stuck."""
MAX_STUCK = 8
"""Stuck calls in one batch after which even masking gives up: each costs the time limit and a fresh event loop."""
POLL_S = 0.05
TURN_S = 0.002
"""Seconds that calls which never wait may run before others that did wait go on."""

Result = TypeVar("Result", ResetResult, StepResult)


class EpisodeRunner:
    """Calls one environment from a background event loop.

    An environment that computes for long, or runs code it does not trust, should do so in a process of its own. One that
    blocks the event loop is noticed and given up, unless it holds Python's global lock too: that nothing in the process
    can notice.
    """

    def __init__(
        self,
        environment: Environment,
        timeout_s: float,
        on_error: Literal["error", "mask"] = "error",
        owner: str = "environment",
        max_concurrent: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`owner` is what messages call the environment; `max_concurrent` is what its provider says of the same name. Its
        tokens are below `vocab_size`, where that is known."""
        self._environment = environment
        self._owner = owner
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._max_concurrent = MAX_CONCURRENT if max_concurrent is None else min(max_concurrent, MAX_CONCURRENT)
        self._vocab_size = vocab_size
        self._thread: LoopThread | None = None

    @property
    def masks_failures(self) -> bool:
        """Whether the recipe masks the samples that the environment fails on; else the first of them ends the run."""
        return self._on_error == "mask"

    def reset_all(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[ResetResult | Failure]:
        """Begin an episode on each row. RewardError for the first that fails, or a Failure in its place where masked.

        Masked or not, ContractError where the environment returns something else than the interface says, and what it raises
        itself of DataError (the row is wrong), PluginError (it cannot work here), ConfigError, ModelError, StorageError,
        WorkerError (a process of its own has died) and KeyboardInterrupt: none of them is the fault of one episode."""
        if len(rows) != len(seeds):
            raise ContractError(f"reset_all: found {len(rows)} rows and {len(seeds)} seeds; expected as many of each")
        calls = _Calls(
            function="reset",
            number=len(rows),
            start=lambda index: self._environment.reset(rows[index], int(seeds[index])),
            check=lambda result: check_reset(result, self._vocab_size),
            describe=lambda index: f"row {shown(rows[index], 160)}",
        )
        return self._run(calls)

    def step_all(self, states: Sequence[Any], turns: Sequence[Turn]) -> list[StepResult | Failure]:
        """Answer a turn of each episode. Errors as in reset_all; a reward that is not finite counts as a failure."""
        if len(states) != len(turns):
            raise ContractError(f"step_all: found {len(states)} states and {len(turns)} turns; expected as many of each")
        calls = _Calls(
            function="step",
            number=len(turns),
            start=lambda index: self._environment.step(states[index], turns[index]),
            check=lambda result: check_step(result, self._vocab_size),
            describe=lambda index: (
                f"response {shown(turns[index].text, 120)} to the task with state {shown(states[index], 120)}"
            ),
        )
        return self._run(calls)

    def close(self) -> None:
        """End the background thread. The runner can be used again and then starts another."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _run(self, calls: "_Calls[Result]") -> "list[Result | Failure]":
        outcomes: dict[int, Result | Failure] = {}
        stuck: dict[int, Failure] = {}
        while len(outcomes) < calls.number:
            todo = [index for index in range(calls.number) if index not in outcomes]
            sweep = _Sweep(calls, todo, self._timeout_s, self._max_concurrent, stop_at_first=self._on_error == "error")
            stuck |= self._drive(sweep)
            outcomes |= sweep.outcomes
            outcomes |= stuck
            self._raise_first(calls, outcomes)
            if len(stuck) > MAX_STUCK:
                what = self._message(calls, *min(stuck.items()))
                raise RewardError(f"{what}. More than {MAX_STUCK} calls got stuck like this one: correct the environment")
        return [outcomes[index] for index in range(calls.number)]

    def _raise_first(self, calls: "_Calls[Result]", outcomes: "Mapping[int, Result | Failure]") -> None:
        """Raise what the recipe does not let pass: an interrupt, else the failure of the lowest number."""
        failures = {index: outcome for index, outcome in sorted(outcomes.items()) if isinstance(outcome, Failure)}
        for failure in failures.values():
            if failure.interrupts:
                raise KeyboardInterrupt from failure.error
        for index, failure in failures.items():
            if failure.is_final:
                raise failure.final_error(self._where(calls, index)) from failure.error
            if self._on_error == "error":
                remedy = 'Correct the environment or the row, or leave such samples out: rollout.on_environment_error = "mask"'
                raise RewardError(f"{self._message(calls, index, failure)}. {remedy}") from failure.error

    def _message(self, calls: "_Calls[Result]", index: int, failure: Failure) -> str:
        """A failure, with the environment and the episode that it is of."""
        return f"{self._where(calls, index)}, {failure.reason}"

    def _where(self, calls: "_Calls[Result]", index: int) -> str:
        return f"{self._owner}.{calls.function}, episode {index} of {calls.number} ({calls.describe(index)})"

    def _drive(self, sweep: "_Sweep[Result]") -> dict[int, Failure]:
        """Run the sweep to its end; where a call gets stuck, give the event loop up and name the call."""
        if self._thread is None:
            self._thread = LoopThread()
        future = self._thread.submit(sweep.run())
        try:
            seen, quiet_s = sweep.heartbeats, 0.0
            # Time is counted in polls: a process that was stopped and continued must not find all its calls overdue.
            while not self._thread.ends(future, POLL_S):
                seen, quiet_s = sweep.heartbeats, quiet_s + POLL_S if sweep.heartbeats == seen else 0.0
                if quiet_s > self._timeout_s + GRACE_S or sweep.uncancellable:
                    return self._give_up(sweep)
            future.result()
        except BaseException:
            future.cancel()
            raise
        return {}

    def _give_up(self, sweep: "_Sweep[Result]") -> dict[int, Failure]:
        assert self._thread is not None
        culprits = sweep.uncancellable or sweep.executing(self._thread.loop)
        limit, where = f"{self._timeout_s:g} s (rollout.environment_timeout_s)", self._thread.where()
        sweep.over = True
        self._thread.abandon()
        self._thread = None
        reason = f"neither returned nor let itself be cancelled within {limit}; the event loop is {where}"
        stuck = {index: Failure(reason=reason) for index in culprits if index not in sweep.outcomes}
        if not stuck:
            raise RewardError(f"the environment's event loop has been blocked for {limit} by none of its calls; it is {where}")
        return stuck


@frozen(kw_only=True, eq=False)
class _Calls(Generic[Result]):
    """A batch of calls of one of the environment's functions."""

    function: Literal["reset", "step"]
    number: int
    start: Callable[[int], Awaitable[Any]]
    check: Callable[[Any], Result]
    describe: Callable[[int], str]


class _Sweep(Generic[Result]):
    """The part that runs on the event loop: a few lanes that take one call after another.

    A lane a call would cost a task a call, and a timer each a heap operation; so lanes are tasks and one watch looks at all.
    """

    def __init__(
        self, calls: _Calls[Result], todo: Sequence[int], timeout_s: float, max_concurrent: int, *, stop_at_first: bool
    ) -> None:
        self.outcomes: dict[int, Result | Failure] = {}
        self.heartbeats = 0
        """Grows while the event loop turns."""
        self.uncancellable: list[int] = []
        """Calls that were cancelled and go on."""
        self._calls: _Calls[Result] = calls
        self._timeout_s = timeout_s
        self._stop_at_first = stop_at_first
        self._todo: Iterator[int] = iter(todo)
        self._num_lanes = min(max_concurrent, len(todo))
        self._running: dict[asyncio.Task[None], tuple[int, float]] = {}
        self._cancelled: set[asyncio.Task[None]] = set()
        self._yield_at = 0.0
        self.over = False
        """Set where the sweep ends or its event loop is given up: no further call may start."""

    async def run(self) -> None:
        """Make all calls, or those until one has failed, with stop_at_first or where masking is no answer to the failure."""
        lanes: list[asyncio.Task[None]] = [asyncio.create_task(self._lane()) for _ in range(self._num_lanes)]
        watch = asyncio.create_task(self._watch())
        try:
            await asyncio.wait(lanes, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.over = True
            for task in (watch, *lanes):
                task.cancel()
            ended, _ = await asyncio.wait([watch, *lanes], timeout=GRACE_S)
        errors = [task.exception() for task in ended if not task.cancelled()]
        for error in errors:
            if error is not None and not isinstance(error, _FirstFailure):
                raise error

    def executing(self, loop: asyncio.AbstractEventLoop) -> list[int]:
        """The call whose code the loop is executing; all in flight where it executes none of them."""
        task = asyncio.current_task(loop)
        running = dict(self._running)
        return [index for lane, (index, _) in running.items() if task not in running or lane is task]

    async def _lane(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        for index in self._todo:
            if self.over:
                return
            self._running[task] = (index, time.monotonic())
            try:
                outcome = await self._outcome(index, task)
            finally:
                del self._running[task]
            self.heartbeats += 1
            self.outcomes[index] = outcome
            if isinstance(outcome, Failure) and (self._stop_at_first or outcome.ends_run):
                raise _FirstFailure
            if time.monotonic() > self._yield_at:  # calls that never wait must not keep the others from going on
                await asyncio.sleep(0)
                self._yield_at = time.monotonic() + TURN_S

    async def _outcome(self, index: int, task: asyncio.Task[None]) -> Result | Failure:
        outcome: Result | Failure
        try:
            outcome = self._calls.check(await _awaitable(self._calls.start(index)))
        except asyncio.CancelledError as error:
            if task.cancelling() and task not in self._cancelled:
                raise
            outcome = Failure.of(error)
        except BaseException as error:  # a panic in a native library is no Exception
            if self.over and isinstance(error, (Abandoned, GeneratorExit)):  # which end the call, not the environment
                raise
            outcome = Failure.of(error)
        if task in self._cancelled and not (isinstance(outcome, Failure) and outcome.interrupts):
            self._cancelled.discard(task)
            task.uncancel()
            outcome = Failure(reason=f"took longer than {self._timeout_s:g} s (rollout.environment_timeout_s)")
        return outcome

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(self._timeout_s / 4, POLL_S))
            self.heartbeats += 1
            now = time.monotonic()
            for task, (index, started) in list(self._running.items()):
                if now - started <= self._timeout_s:
                    break  # a dict keeps the order of insertion: all others started later
                if task not in self._cancelled:
                    self._cancelled.add(task)
                    task.cancel()
                elif now - started > self._timeout_s + GRACE_S:
                    self.uncancellable.append(index)


class _FirstFailure(Exception):
    """Ends a sweep; the failure is among its outcomes."""


def _awaitable(value: Any) -> Awaitable[Any]:
    if not hasattr(value, "__await__"):
        raise ContractError(f"returned {type(value).__name__} at once; expected an awaitable: write it as `async def`")
    awaitable: Awaitable[Any] = value
    return awaitable

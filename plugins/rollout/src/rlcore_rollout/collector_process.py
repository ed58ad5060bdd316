"""A collector in a process of its own: it carries out the driver's commands, and sends it the events of its groups."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import groupby
from time import monotonic
from typing import Any

from attrs import define, evolve, field, frozen

from rlcore.registry.binding import build_environment
from rlcore.registry.selection import ChosenPlugin, load_chosen
from rlcore.run.data.mixes import MixedEnvironment
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import EnvironmentContext, Row, Tokenizer, ToolParser
from rlcore.spi.arrays import Int32Array
from rlcore.spi.execution import GeneratorGroup
from rlcore_rollout.collector_messages import Command, Event, GroupStart, Message, Reply, RunOptions, portable
from rlcore_rollout.environment_calls import POLL_S
from rlcore_rollout.environment_results import MaskedFailures
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.failures import LeftOut, Outcome
from rlcore_rollout.group_collector import GroupCollector
from rlcore_rollout.group_work import GroupResult
from rlcore_rollout.packed_groups import PackedGroups, Texts
from rlcore_rollout.sampler import EpisodeSampler
from rlcore_rollout.schedule import Schedule, SchedulePolicy
from rlcore_rollout.step_plans import Draws, StepPlan, StepPlans

GATHER_S = 0.05
"""Least seconds between two answers, so that each brings much where much happens: the driver pays by answers."""
COLLECT_S = 1.0
"""Most seconds for an answer with nothing in it."""
BETWEEN = frozenset({"begin", "replace", "go_on", "forget", "restart", "part", "records", "saved", "resume"})
"""Commands that run between two events of the groups."""


@frozen(kw_only=True, eq=False)
class EnvironmentParts:
    """A builder of the recipe's environment in another process. It pickles."""

    plugins: Sequence[tuple[ChosenPlugin, Any]]
    """The environment, and those of other data sets, each with its section."""
    of_set: Mapping[str, str]
    """The environment of each data set that names one."""
    seed: int

    def build(self) -> Any:
        """Build it."""
        context, built = EnvironmentContext(seed=self.seed), {}
        for plugin, section in self.plugins:
            built[plugin.name] = build_environment(load_chosen(plugin), context, section)
        backends: Any = built
        return next(iter(built.values())) if len(built) == 1 else MixedEnvironment(backends=backends, of_set=self.of_set)


@frozen(kw_only=True, eq=False)
class CollectorParts:
    """A builder of a collector in another process. It pickles."""

    environment: EnvironmentParts
    timeout_s: float
    on_error: Any
    owner: str
    max_concurrent: int | None
    """Calls at once of all collectors; None where nobody limits them."""
    vocab_size: int | None
    tokenizer: Tokenizer
    tool_parser: ToolParser | None

    def __call__(self, generator: GeneratorGroup, number: int, num_collectors: int) -> "CollectorProcess":
        """See MakeEndpoint."""
        most = self.max_concurrent
        share = None if most is None else most // num_collectors + (number < most % num_collectors)
        runner = EpisodeRunner(self.environment.build(), self.timeout_s, self.on_error, self.owner, share, self.vocab_size)
        return CollectorProcess(self, runner, generator)


class _SentFailures(MaskedFailures):
    """Sends each failure to the driver, which counts those of all collectors."""

    def __init__(self, send: Callable[..., None]) -> None:
        super().__init__(num_samples=0, of="a collector", max_fraction=float("inf"))
        self._send = send

    def add(self, sample: int, reason: str) -> None:
        """See MaskedFailures."""
        if sample not in self.reasons:
            self._send("failed", sample, reason)
        super().add(sample, reason)

    def check(self) -> None:
        """See MaskedFailures: the driver does."""


class _SentPlans(StepPlans):
    """The rows and random choices of groups, as the driver sends them."""

    def __init__(self, policy: SchedulePolicy, group_size: int) -> None:
        super().__init__(self._unknown, policy.groups_per_step, group_size)
        self._shape = (policy.groups_per_step, group_size)

    def add(self, start: GroupStart) -> None:
        """Know what a group begins with."""
        step, place = self.step_of(start.number), self.place_of(start.number)
        if step not in self._plans:
            nothing: list[Any] = [None] * self._shape[0]
            self._plans[step] = StepPlan(rows=nothing, numbers=list(nothing), draws=Draws(start.key, *self._shape))
        plan: Any = self._plans[step]
        plan.rows[place], plan.numbers[place] = start.row, start.row_number

    def row_number(self, group: int) -> int | None:
        """See StepPlans."""
        return self.of_step(self.step_of(group)).numbers[self.place_of(group)]

    def _unknown(self, step: int) -> StepPlan:
        raise KeyError(f"no group of step {step} was sent; this is a defect of rlcore")


class _SampleEvents(Progress):
    """Sends the driver how many samples have ended."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send

    def samples(self, num_sampled: int, num_asked: int) -> None:
        """See Progress."""
        self._send("sampled", num_sampled, num_asked)


class _Run:
    """The groups of one run in this process: commands by their names, and the events of its GroupCollector."""

    def __init__(self, process: "CollectorProcess", number: int, options: RunOptions) -> None:
        self._process = process
        self._number = number
        self._still = ExitStack()
        self.is_closed = False
        self.at_work = threading.Lock()
        """Held while commands run."""
        parts, policy = process.parts, options.policy
        sampler = EpisodeSampler(
            **options.sampler,
            generator=process.generator,
            episodes=process.runner,
            tokenizer=parts.tokenizer,
            tool_parser=parts.tool_parser,
            clock=PhaseClock(Progress()),
            progress=_SampleEvents(self._send),
            on_tokens=self._on_tokens if options.sends_tokens else None,
        )
        self._plans = _SentPlans(policy, sampler.samples_per_prompt)
        self._failures = _SentFailures(self._send)
        work = sampler.work_of(Schedule(policy), self._plans, self._failures)
        self.collector = GroupCollector(
            work=work,
            runner=process.runner,
            pack=sampler.packed,
            capacity=policy.capacity,
            starts_together=policy.starts_together,
            overlaps=True,
        )
        self.collector.listen(self)

    def _send(self, name: Any, *arguments: Any) -> None:
        self._process.send(Event(run=self._number, name=name, arguments=arguments))

    def _on_tokens(self, tokens: Int32Array, images: tuple[bytes, ...]) -> None:
        self._send("tokens", tokens, images)

    # Events.

    def begun(self, number: int) -> None:
        """See PromptEvents."""
        self._send("begun", number)

    def too_long(self, number: int, row: Row, num_tokens: int) -> None:
        """See PromptEvents."""
        self._send("too_long", number, row, num_tokens)

    def ended(self, result: GroupResult) -> None:
        """See GroupEvents."""
        self._send("ended", result)

    def left_out(self, episodes: LeftOut) -> None:
        """See GroupEvents."""
        self._send("left_out", episodes)

    def look(self) -> None:
        """See GroupEvents: the driver looks behind each event."""

    # Commands.

    def begin_step(self) -> None:
        """See Collectors."""
        self.collector.begin_step()

    def begin_stream(self, weight_version: int) -> None:
        """Generate from now on, until `pause`."""
        self.collector.begin_stream(self._process.generator, weight_version)

    def pause(self) -> None:
        """See Collectors."""
        self.collector.pause()

    def hold(self) -> None:
        """Begin `still` of Collectors."""
        self._still.enter_context(self.collector.still())

    def release(self) -> None:
        """End it."""
        self._still.close()

    def figures(self) -> tuple[float, float, Sequence[Mapping[str, Any]]]:
        """Return `idle_s` and `busy_s` of Collectors, and the slowest calls since the last time."""
        return self.collector.idle_s(), self.collector.busy_s(), self._process.runner.slowest.take()

    def close(self) -> None:
        """See Collectors. Its groups can be saved, until another run opens."""
        self.is_closed = True
        self.collector.close()

    def begin(self, starts: Sequence[GroupStart]) -> None:
        """See Collectors."""
        for start in starts:
            self._plans.add(start)
        self.collector.begin([start.number for start in starts])

    def replace(self, number: int, row: Row | None, spare: int) -> None:
        """See Collectors."""
        self.collector.replace(number, row, spare)

    def go_on(self, numbers: Collection[int]) -> None:
        """See Collectors."""
        self.collector.go_on(numbers)

    def forget(self, numbers: Collection[int], outcome: Outcome | None) -> None:
        """See Collectors."""
        self.collector.forget(numbers, outcome)
        self._failures.forget(self.collector.work.group_size, numbers)
        self._plans.keep(self.collector.groups)

    def restart(self, numbers: Collection[int]) -> list[int]:
        """See Collectors."""
        return self.collector.restart(numbers)

    def part(self, numbers: Sequence[int]) -> PackedGroups:
        """Return the columns of groups that have ended."""
        part = self.collector.part(numbers)
        return evolve(part, rollouts=evolve(part.rollouts, responses=Texts(part.rollouts.responses)))

    def records(self, numbers: Sequence[int]) -> Any:
        """See Collectors."""
        return self.collector.records(numbers)

    def saved(self, numbers: Sequence[int]) -> tuple[dict[int, bytes], list[str]]:
        """See Collectors."""
        return self.collector.saved(numbers)

    def resume(
        self, starts: Sequence[GroupStart], saved: Mapping[int, bytes], running: Collection[int]
    ) -> tuple[dict[int, GroupResult | None], list[int]]:
        """See Collectors; and which of them are to send `begun` or `too_long`."""
        for start in starts:
            self._plans.add(start)
        found = self.collector.resume(saved, running)
        return found, [number for number in found if self.collector.begins(number)]

    def watch(self) -> BaseException | None:
        """Return the error that has ended the work, once; a command that runs raises it itself."""
        if self.is_closed or not self.at_work.acquire(blocking=False):
            return None
        try:
            self.collector.watch()
        except BaseException as error:
            return error
        finally:
            self.at_work.release()
        return None


@define(eq=False)
class CollectorProcess:
    """See Endpoint."""

    parts: CollectorParts
    runner: EpisodeRunner
    generator: GeneratorGroup
    _runs: dict[int, _Run] = field(factory=dict, init=False)
    _outbox: list[Message] = field(factory=list, init=False)
    _changed: threading.Condition = field(factory=threading.Condition, init=False)
    _last_answer: float = field(default=0.0, init=False)
    _watched_at: float = field(default=0.0, init=False)

    def send(self, message: Message) -> None:
        """Send the driver a message. From any thread."""
        with self._changed:
            self._outbox.append(message)
            self._changed.notify_all()

    def take(self, commands: Sequence[Command]) -> None:
        """See Endpoint."""
        for (number, is_between), group in groupby(commands, lambda one: (one.run, one.name in BETWEEN)):
            run, listed = self._runs.get(number), list(group)
            if run is None or not is_between:
                for one in listed:
                    self._carry_out(self._runs.get(number), one)
                continue
            try:
                with run.at_work:
                    run.collector.between(partial(self._carry_out_all, run, listed))
            except BaseException as error:
                self._fail(number, error)
                for one in listed:  # none of them ran
                    if one.reply is not None:
                        self.send(Reply(run=one.run, number=one.reply, value=None, error=portable(error)))

    def collect(self) -> list[Message]:
        """See Endpoint."""
        deadline = monotonic() + COLLECT_S
        while not self._waits(lambda: bool(self._outbox), POLL_S) and monotonic() < deadline:
            self._watch()
        self._waits(lambda: any(isinstance(one, Reply) for one in self._outbox), self._last_answer + GATHER_S - monotonic())
        self._last_answer = monotonic()
        with self._changed:
            outbox, self._outbox = self._outbox, []
        return outbox

    def _waits(self, until: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(until, timeout_s)

    def close(self) -> None:
        """See Endpoint."""
        for run in list(self._runs.values()):
            with suppress(Exception):
                run.close()
        self.runner.close()

    def _carry_out_all(self, run: _Run, commands: Sequence[Command]) -> None:
        for one in commands:
            self._carry_out(run, one)

    def _carry_out(self, run: _Run | None, command: Command) -> None:
        value, error = None, None
        try:
            if command.name == "open":
                self._runs = {number: one for number, one in self._runs.items() if not one.is_closed}
                self._runs[command.run] = _Run(self, command.run, *command.arguments)
            elif run is not None and command.name in BETWEEN:
                value = getattr(run, command.name)(*command.arguments)
            elif run is not None:
                with run.at_work:
                    value = getattr(run, command.name)(*command.arguments)
        except BaseException as raised:
            error = portable(raised)
        if command.reply is not None:
            self.send(Reply(run=command.run, number=command.reply, value=value, error=error))
        elif error is not None:
            self.send(Event(run=command.run, name="error", arguments=(error,)))

    def _fail(self, number: int, error: BaseException) -> None:
        self.send(Event(run=number, name="error", arguments=(portable(error),)))

    def _watch(self) -> None:
        """Look for errors of all runs."""
        if monotonic() - self._watched_at < POLL_S:
            return
        self._watched_at = monotonic()
        for number, run in list(self._runs.items()):
            if (error := run.watch()) is not None:
                self._fail(number, error)

"""Rewarded samples of steps, whatever runs their episodes: from a schedule's groups to one batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeAlias

from attrs import evolve, frozen

from rlcore import spi
from rlcore.chat.tool_calls import ToolParser
from rlcore.run.data.mixed_rows import DATA_SET
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.protocols import CollectedRollouts
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.rollout.environment_runner import EpisodeRunner
from rlcore.run.rollout.episode_run import EpisodeRun
from rlcore.run.rollout.episode_starts import Draws, StepPlan, StepPlans
from rlcore.run.rollout.gc_tuning import only_young_collections
from rlcore.run.rollout.group_work import GroupT, GroupWork
from rlcore.run.rollout.masked_failures import MaskedFailures
from rlcore.run.rollout.schedule import Schedule, SchedulePolicy
from rlcore.spi.execution import GeneratorGroup

Distribution: TypeAlias = tuple[float, int, float, bool]
"""What the generator's log-probabilities are of: temperature, top_k and top_p, and whether it is told what they had kept."""


@frozen(kw_only=True, eq=False)
class StepCollector(ABC, Generic[GroupT]):
    """Collects the samples of steps. Every random choice follows from the plans of the steps."""

    generator: GeneratorGroup
    episodes: EpisodeRunner
    tokenizer: Tokenizer
    sampling: spi.SamplingParams
    samples_per_prompt: int
    max_response_tokens: int
    max_failed_fraction: float
    """The largest share of the samples that may be masked, since their environment failed."""
    sampling_mask: bool = False
    """Whether the batch is to say what the generator chose each token among."""
    tool_parser: ToolParser | None = None
    """What reads the calls of tools; None where nothing says how the model writes them."""
    purpose: str = "the step"
    """What the samples are for, in words."""
    is_mixed: bool = False
    """Whether the prompts are of several data sets, which their rows name."""
    clock: PhaseClock
    progress: Progress

    @property
    def distribution(self) -> Distribution:
        """What tokens are sampled from."""
        return self.sampling.temperature, self.sampling.top_k, self.sampling.top_p, self.sampling_mask

    @abstractmethod
    def work_of(self, schedule: Schedule, plans: StepPlans, failures: MaskedFailures) -> GroupWork[GroupT]:
        """What the groups of a schedule do."""

    @abstractmethod
    def packed(self, groups: Sequence[GroupT]) -> CollectedRollouts:
        """The samples of groups that have ended, groups adjacent."""

    def collect(
        self, rows: Sequence[spi.Row], weight_version: int, seed: Sequence[int], spare: Iterable[spi.Row] = ()
    ) -> CollectedRollouts:
        """`samples_per_prompt` samples of each row, adjacent. A row whose prompt is over the limit is replaced by one of
        `spare`, or else left out, where the recipe says so. `seed` is a key of numpy's SeedSequence."""
        plan = StepPlan(rows=rows, draws=Draws(seed, len(rows), self.samples_per_prompt), spare=iter(spare))
        run = self.run_of(Schedule(SchedulePolicy(groups_per_step=len(rows), num_steps=1)), lambda _: plan)
        try:
            collected = self.collect_step(run, weight_version)
        finally:
            run.close()  # behind a worker that died, too: it is another run that is tried again
        assert collected is not None, "nothing keeps it from going on"
        return collected

    def run_of(self, schedule: Schedule, plan_of: Callable[[int], StepPlan], *, overlaps: bool = False) -> EpisodeRun[GroupT]:
        """The episodes of a schedule; `plan_of` returns what the groups of a step begin with, steps counted from 0. With
        `overlaps` the generator goes on while others train."""
        policy, group_size = schedule.policy, self.samples_per_prompt
        failures = MaskedFailures(
            num_samples=policy.capacity * group_size, of=self.purpose, max_fraction=self.max_failed_fraction
        )
        work = self.work_of(schedule, StepPlans(plan_of, policy.groups_per_step, group_size), failures)
        return EpisodeRun(schedule=schedule, work=work, runner=self.episodes, overlaps=overlaps)

    def collect_step(
        self, run: EpisodeRun[GroupT], weight_version: int, may_go_on: Callable[[], bool] = lambda: True
    ) -> CollectedRollouts | None:
        """The samples of the next step, groups adjacent; None where `may_go_on` turned False before they were there."""
        with only_young_collections():
            with self.clock.phase("generation"):
                groups = run.collect(self.generator, weight_version, may_go_on)
                idle_s = run.work.count.idle_s()  # within the phase, of which it is a part
            self.clock.move("generation", "rewards", idle_s)
            if not groups:
                return None
            self.note(run, groups)
            collected = self.packed(groups)
            if not self.is_mixed:
                return collected
            rows = [row for group in groups if (row := run.work.row(group)) is not None]
            return evolve(collected, data_sets=[str(row[DATA_SET]) for row in rows])

    def note(self, run: EpisodeRun[GroupT], groups: Sequence[GroupT]) -> None:
        """Say what became of samples whose environment failed."""
        size, failures = self.samples_per_prompt, run.work.failures
        if not failures.reasons:
            return
        numbers = [sample for group in groups for sample in range(group.number * size, (group.number + 1) * size)]
        reasons = {sample: failures.reasons[sample] for sample in numbers if sample in failures.reasons}
        if reasons:
            self.progress.note(str(evolve(failures, reasons=reasons, num_samples=len(numbers), replaced={})))

"""The source of a step's samples of the policy."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from attrs import evolve

from rlcore.run.data.mixes import rows_at
from rlcore.run.data.prompt_stream import PromptOrder, RandomPurpose
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.protocols import CollectedRollouts, Source, always
from rlcore.spi import Row, capabilities
from rlcore.spi.arrays import Int64Array
from rlcore_rollout.curriculum import Curriculum, CurriculumState
from rlcore_rollout.episode_run import EpisodeRun
from rlcore_rollout.failures import StepEndings, ledger_name
from rlcore_rollout.gc_tuning import step_begins, step_ends
from rlcore_rollout.group_work import GroupResult, GroupRewards
from rlcore_rollout.sampler import Replay, StepSampler
from rlcore_rollout.saved_rollouts import SavedRollouts, damage_told, dumps, loads, restore_rollouts, save_rollouts
from rlcore_rollout.schedule import Position, SchedulePolicy
from rlcore_rollout.step_plans import Draws, StepPlan
from rlcore_rollout.trace_records import PlanRecord, ReplacedRecord, StepRecord, step_record


class RolloutSource(Source):
    """Rewarded samples of the policy: of the present one, or within the schedule's bound of those before it."""

    generates = True

    def __init__(
        self,
        *,
        sampler: StepSampler[Any],
        rows: Sequence[Row],
        kept: Int64Array,
        stream: PromptOrder | Curriculum,
        seed: int,
        policy: SchedulePolicy,
        restarts: bool,
        overlaps: bool,
        replay: Replay | None = None,
    ) -> None:
        """`kept` int64 [P] are the rows within the limits. `restarts` begins unfinished samples again after each step; else
        they go on. `overlaps` lets the generator go on while others train. A `replay` does neither."""
        self._sampler = sampler
        self._rows = rows
        self._kept = kept
        self._stream = stream
        self._curriculum = stream if isinstance(stream, Curriculum) else None
        self._has_signal: dict[int, bool] = {}
        """True where the rewards of the last batch's groups differed, and of those that were replaced before it."""
        self._success: dict[int, float] = {}
        """The share of solved samples of the last batch's groups."""
        self._rewards: dict[int, GroupRewards] = {}
        """The rewards of the last batch's groups, and of those that were replaced before it."""
        self._seed = seed
        self._policy = policy
        self._restarts = restarts and replay is None
        self._overlaps = overlaps and replay is None
        self._replay = replay
        self._is_exact = replay is not None
        """True where a replay has been what the recorded run was."""
        self._record: StepRecord | None = None
        self.endings = StepEndings()
        """The ends of the last step's episodes."""
        self.is_reused = False
        """True where the last step trained on the batch of the one before."""
        self._run = self._run_at(self._position(0))
        self._version_of_step: dict[int, int] = {}
        """The weights that each of the last steps began with."""
        self._next_of_step = 0
        """The group that the present step begins with, where it takes none from before."""
        self._spared: Mapping[int, int] = {}
        """The rows that had taken the places of others when it began, by step."""
        self._carries = False
        """True where groups were open when it began."""

    def begin(self, step: int, saved: bytes | None) -> None:
        """Begin behind a step. CheckpointError where what was saved cannot be read."""
        self.close()
        if saved is None:
            self._begin_at(SavedRollouts(position=self._position(step)))
        else:
            with damage_told():
                found = loads(saved)
                if found.position.trained != step:
                    raise ValueError(f"found the position behind step {found.position.trained}; expected that of step {step}")
                self._begin_at(found)
        self._note_beginning()

    def _begin_at(self, found: SavedRollouts) -> None:
        self._version_of_step = dict(found.version_of_step)
        if self._curriculum is not None:
            self._curriculum.begin(found.position.next_number // self._policy.groups_per_step, found.curriculum)
        self._run = self._run_at(found.position)
        restore_rollouts(self._run, found, self._sampler.distribution, self._sampler.progress.note)
        self.generates = self._generates_behind(found.position.trained) or not self._run.schedule.reuses

    @contextmanager
    def interruptible(self, guard: InterruptGuard) -> Iterator[Callable[[], bool]]:
        """Samples that a later step can train on are not to be lost: a signal then waits until the generator has given back
        what it has."""
        if not self._policy.carries_samples:
            yield always
            return
        with guard.deferred():
            yield lambda: not guard.pressed

    def sample(self, step: int, weight_version: int, may_go_on: Callable[[], bool] = always) -> CollectedRollouts | None:
        """At a staleness of 0 determined by seed, step and weights."""
        schedule, reuses = self._run.schedule, self._run.schedule.reuses
        assert schedule.trained == step - 1, "steps follow each other"
        self._version_of_step[step - 1] = weight_version
        collected = self._sampler.collect_step(self._run, weight_version, may_go_on)
        if collected is None:
            return None
        step_begins(len(collected.rewards))
        self.is_reused, self.generates = reuses, self._generates_behind(step)
        collected = evolve(collected, weight_version=weight_version)
        results = self._run.results()
        self.endings = self._endings(results)
        figures: dict[str, float] = {}
        if self._curriculum is not None:
            if self._replay is not None:
                self._run.replaced |= self._replay.replaced(step)
            figures |= self._curriculum.metrics()
            learned = () if reuses else [result for result in results if result.rates_row]  # each sample tells of its row once
            self._has_signal = {} if reuses else self._signals(learned)
            self._success = {result.number: result.success_rate for result in learned}
            self._rewards = {} if reuses else self._rewards_of(learned)
        if self._sampler.round_size is not None:
            sizes = np.bincount(collected.group_ids[collected.first_sequences])
            figures |= {"samples_per_prompt_mean": float(sizes.mean()), "samples_per_prompt_max": float(sizes.max())}
        if self._policy.is_synchronous:
            return evolve(collected, schedule_metrics=figures)
        oldest = self._version_of_step.get(self._policy.oldest_unscored(step - 1), 0)
        groups = () if reuses else self._run.records()
        metrics, record = self._run.between(
            lambda: (schedule.metrics(), None if groups is None else step_record(schedule, groups, weight_version))
        )
        if record is not None:
            record = evolve(record, num_rescored=int(collected.older_than(oldest).sum()))
            self._record = record if self._curriculum is None else self._with_choices(record, self._curriculum)
            if self._is_exact and self._replay is not None and (reason := self._replay.difference(self._record)) is not None:
                self._is_exact = False
                self._sampler.progress.note(
                    f"replay, step {step}: {reason}. From here on it equals other replays of the file, not the run that "
                    "wrote it"
                )
        return evolve(collected, schedule_metrics=figures | metrics, oldest_version=oldest)

    def trained(self) -> None:
        """Close the step's groups, and those that are too old for the next step."""
        if self._curriculum is not None:
            self._curriculum.learn(self._has_signal, self._success, self._rewards)
        if self._restarts:
            self._run.pause()
        self._run.train()
        if self._restarts:
            self._run.restart()
        oldest = self._policy.oldest_within_bound(self._run.schedule.trained)
        self._version_of_step = {step: version for step, version in self._version_of_step.items() if step >= oldest}
        self._note_beginning()
        step_ends()

    def recorded(self) -> StepRecord | None:
        """Return the trace of the last step, unless it trained on the groups that began with it."""
        return self._record

    def pause(self) -> None:
        """Stop the present stream; open samples go on with the next one."""
        self._run.pause()

    @property
    def has_failed(self) -> bool:
        """In the stream, or in an environment."""
        return self._run.has_failed

    def generating_s(self) -> float:
        """While others train, too."""
        return self._run.collectors.busy_s()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Calls that were under way have ended when it begins."""
        with self._run.still():
            yield

    def make_way(self) -> None:
        """Samples that are under way see weights that come in flight, unless they begin again with them."""
        if self._restarts or not self._sampler.generator.has(capabilities.IN_FLIGHT_REFIT):
            self._run.pause()

    def state(self) -> bytes | None:
        """The open groups, and the position in the data. At a staleness of 0 a step that began with none begins again as a
        whole, so that it is the one that it would have been."""
        if self._policy.carries_samples or self._carries or self._replay is not None:
            saved = save_rollouts(self._run, self._version_of_step, self._sampler.progress.note)
            saved = evolve(saved, distribution=self._sampler.distribution, curriculum=self._curriculum_state())
            return dumps(saved)
        trained = self._run.schedule.trained
        if self._next_of_step == trained * self._policy.groups_per_step and self._curriculum is None:
            return None
        position = Position(next_number=self._next_of_step, trained=trained)
        return dumps(SavedRollouts(position=position, spared=self._spared, curriculum=self._curriculum_state()))

    def close(self) -> None:
        """End what is under way."""
        self._run.close()
        step_ends()

    def _generates_behind(self, step: int) -> bool:
        """Return whether the generator may be asked for samples once this step is trained."""
        return self._overlaps or self._replay is not None or self._policy.begins_batch(step)

    def _curriculum_state(self) -> CurriculumState | None:
        return None if self._curriculum is None else self._curriculum.state()

    def _signals(self, rated: Sequence[GroupResult]) -> dict[int, bool]:
        """Return whether rewards differ in the batch's groups that tell of their own rows; they did not in such ones that were
        replaced."""
        run = self._run
        replaced = [number for number in run.schedule.refilled if number not in run.replaced or run.replaced[number][0]]
        return {result.number: result.has_signal for result in rated} | dict.fromkeys(replaced, False)

    def _with_choices(self, record: StepRecord, curriculum: Curriculum) -> StepRecord:
        """The record of a step with the rows that were chosen for it, and what they follow from."""
        return evolve(
            record,
            plans=tuple(
                PlanRecord(step=step, rows=tuple(rows.tolist()), end=end)
                for step, (rows, end) in curriculum.take_plans().items()
            ),
            replaced=tuple(
                ReplacedRecord(number=number, rewards=tuple(found[0]), success=found[1])
                for number in record.refilled
                if (found := self._run.replaced.get(number)) is not None
            ),
        )

    def _endings(self, results: Sequence[GroupResult]) -> StepEndings:
        """The rows of the batch's groups, and the episodes that were left out since the batch before."""
        run = self._run
        numbers = [run.row_number(result) for result in results if not result.is_left_out]
        left_out = run.between(run.take_left_out)
        return StepEndings(
            rows=[self._name(number) for number in numbers], left_out=[(self._name(one.row), one) for one in left_out]
        )

    def _name(self, number: int | None) -> str:
        return "" if number is None else ledger_name(self._rows, number)

    def _rewards_of(self, rated: Sequence[GroupResult]) -> dict[int, GroupRewards]:
        """The rewards of the batch's groups that tell of their own rows, and of such ones that were replaced before it."""
        run = self._run
        replaced = {number: found for number in run.schedule.refilled if (found := run.replaced.get(number)) is not None}
        rewards: dict[int, GroupRewards] = {result.number: (result.rewards, result.success_rate) for result in rated}
        return {number: found for number, found in (rewards | replaced).items() if found[0]}

    def _note_beginning(self) -> None:
        """A step begins."""
        run = self._run
        open_groups, next_number, self._spared = run.between(
            lambda: (run.schedule.open_groups, run.schedule.next_number, run.plans.spared())
        )
        self._next_of_step, self._carries = next_number, bool(open_groups)
        if self._curriculum is not None:
            self._curriculum.forget_before(min([next_number, *open_groups]) // self._policy.groups_per_step)

    def _position(self, step: int) -> Position:
        return Position(next_number=step * self._policy.groups_per_step, trained=step)

    def _run_at(self, position: Position) -> EpisodeRun:
        schedule = self._sampler.schedule(self._policy, position)
        return self._sampler.run_of(schedule, self._plan_of, overlaps=self._overlaps)

    def _plan_of(self, step: int) -> StepPlan:
        indices = self._kept[self._stream.indices(step)]
        return StepPlan(
            rows=rows_at(self._rows, indices),
            draws=Draws((self._seed, RandomPurpose.ROLLOUTS, step + 1), len(indices), self._sampler.samples_per_prompt),
            numbers=indices.tolist(),
            spare=self._following(step),
        )

    def _following(self, step: int) -> Iterator[Row]:
        """One whole pass over the data from behind a step's rows. The next step begins there all the same: what a step takes
        follows from its number, whatever was left out before."""
        for index in self._kept[self._stream.following(step)]:
            yield self._rows[int(index)]

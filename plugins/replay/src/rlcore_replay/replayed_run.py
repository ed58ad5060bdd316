"""A recorded schedule once more: the same groups in the same steps, and each part of a sample with the weights that it had.

Nothing goes on while others train, and nothing depends on time. What a step's weights are to generate is asked for in rounds:
a round is asked for at once, in the groups' order, when the generator has answered the one before and the environment has
answered that. So what runs beside a sample, and with it the rounding, is the same in each replay.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve, fields, frozen

from rlcore.spi import FinishReason
from rlcore_replay.rollout_trace import RolloutTrace, differing
from rlcore_rollout.environment_calls import EnvironmentCalls
from rlcore_rollout.environment_results import Failure
from rlcore_rollout.episode import Completion, Episode
from rlcore_rollout.episode_group import EpisodeGroup
from rlcore_rollout.group_work import GroupRewards, PromptEvents
from rlcore_rollout.prompt_groups import PromptGroups
from rlcore_rollout.sampler import EpisodeSampler
from rlcore_rollout.schedule import Position, Schedule, SchedulePolicy
from rlcore_rollout.trace_records import LostRecord, StepRecord
from rlcore_rollout.turns import Turns

MAX_SHOWN = 5
"""Groups that a note names."""


class ReplaySchedule(Schedule):
    """Begins and takes the groups that a file names. A batch is there once all is generated that its weights are to generate,
    that of later batches too."""

    def __init__(self, policy: SchedulePolicy, recorded: RolloutTrace, position: Position) -> None:
        running, complete = (
            {number: began for number, began in groups.items() if number in recorded.groups}
            for groups in (position.running, position.complete)
        )
        own = Position(
            next_number=position.next_number,
            trained=position.trained,
            running=running,
            complete=complete,
            reused=position.reused,
        )
        super().__init__(policy, own)
        self.recorded = recorded
        self._is_generated = False

    def position(self) -> Position:
        """Where it stands. A run that goes on from here without the file begins the groups that the file leaves open."""
        position = super().position()
        past = self.recorded.steps[: self.trained]
        closed = {number for step in past for number in (*step.dropped, *step.refilled, *(one.number for one in step.groups))}
        begun = position.running.keys() | position.complete.keys()
        position.next_number = max([position.next_number, *(number + 1 for number in begun)])
        left = set(range(position.next_number)) - closed - begun
        position.running |= dict.fromkeys(sorted(left), self.trained)
        position.dropped, position.refilled = [], []  # what the file had given up by its next step begins once more
        return position

    def admit(self) -> list[int]:
        """The groups of later steps that had begun by now."""
        at = self._at
        later = [group for step in self.recorded.steps[at.trained :] for group in step.groups]
        begun = {one.number: one.began for one in later if one.began <= at.trained and not self._is_open(one.number)}
        at.running |= begun
        at.next_number = max([at.next_number, *(step.next for step in self.recorded.steps[at.trained : at.trained + 1])])
        return sorted(begun)

    def end(self, number: int, *, has_signal: bool) -> bool:  # noqa: ARG002 - none is replaced that the file has
        """A group has ended."""
        return super().end(number, has_signal=True)

    def generated(self) -> None:
        """All is there that the present weights are to generate."""
        self._is_generated = True

    @property
    def num_open(self) -> int:
        """Groups that ran, or had ended, while the step trained."""
        return self.recorded.steps[self.trained].num_open

    def can_take(self) -> bool:
        """Return whether all is there that the present weights are to generate, for a batch that is used again, too."""
        return self._is_generated and super().can_take()

    def take(self) -> list[int]:
        """The groups of the next step, with what the file's run had given up by then."""
        step = self.recorded.steps[self.trained]
        self._at.dropped, self._at.refilled = list(step.dropped), list(step.refilled)
        return super().take()

    def train(self) -> list[int]:
        """The batch was trained on."""
        self._is_generated = False
        return super().train()

    def _is_open(self, number: int) -> bool:
        return any(number in groups for groups in (self._at.running, self._at.complete, self._training))

    def _next(self) -> list[int]:
        if self._training or not self._is_generated:
            return []
        return [group.number for group in self.recorded.steps[self.trained].groups]


class ReplayTurns(Turns):
    """Turns whose parts wait for the weights that generated them, and for their round."""

    def __init__(self, *, recorded: RolloutTrace, **options: Any) -> None:
        super().__init__(**options)
        self._recorded = recorded
        self._waiting: dict[int, Episode] = {}
        """Episodes whose next part is to be asked for, by number."""
        self.look_again: Callable[[], None] = lambda: None
        """Called when one begins to wait, or has ended."""

    def begin(self, calls: EnvironmentCalls, on_ended: Callable[[Episode], None]) -> None:
        """Work on this event loop from now on."""
        self._waiting.clear()
        super().begin(calls, on_ended)

    def all_wait(self, groups: Iterable[EpisodeGroup]) -> bool:
        """Return whether all open episodes wait, those of some groups among them: no answer is to come."""
        if len(self._open) != len(self._waiting):
            return False
        return all(
            group.has_begun and all(one.ended or one.number in self._waiting for one in group.episodes) for group in groups
        )

    def ask_due(self, num_trained: int) -> bool:
        """Ask for the parts that the weights behind so many steps generated, a round; False where there is none."""
        due = [self._waiting[number] for number in sorted(self._waiting) if self._span(self._waiting[number])[0] <= num_trained]
        for episode in due:
            del self._waiting[episode.number]
        super()._ask(due)
        return bool(due)

    def _ask(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            lost = self._recorded.sample(episode.number).lost
            if self._recorded.span(episode.number, episode.turn, episode.num_partial_tokens) is not None:
                self._waiting[episode.number] = episode
            elif lost is not None:
                self._lose_again(episode, lost)
            else:
                self._end(episode)  # its tokens are others than the file's, and so are its turns
        self.look_again()

    def _end(self, episode: Episode) -> None:
        super()._end(episode)
        self.look_again()

    def _span(self, episode: Episode) -> tuple[int, int]:
        span = self._recorded.span(episode.number, episode.turn, episode.num_partial_tokens)
        assert span is not None, "what waits has a part to be generated"
        return span

    def _limit(self, episode: Episode) -> int:
        return min(super()._limit(episode), self._span(episode)[1])

    def _is_cut(self, episode: Episode, sampled: Completion) -> bool:
        if super()._is_cut(episode, sampled):
            return True
        number, num_said = len(sampled.tokens), episode.num_partial_tokens + len(sampled.tokens)
        if sampled.finish_reason != FinishReason.LENGTH or not number < episode.turn_budget:
            return False
        lost = self._recorded.sample(episode.number).lost
        goes_on = self._recorded.span(episode.number, episode.turn, num_said) is not None
        return number == sampled.request.max_tokens and (goes_on or (lost is not None and lost.in_turn))

    def _take(self, sampled: Completion) -> None:
        if sampled.finish_reason == FinishReason.ABORTED:  # stopped where the file has no stop: that part begins again
            sampled = evolve(sampled, tokens=sampled.tokens[:0])
        super()._take(sampled)

    def _say(self, episode: Episode, sampled: Completion) -> None:
        super()._say(episode, sampled)
        sample = self._recorded.sample(episode.number)
        is_last = episode.turn + 1 == len(sample.turns)
        if sample.lost is not None and is_last and not sample.lost.in_turn and episode.length >= sample.lost.length:
            self._lose_again(episode, sample.lost)

    def _lose_again(self, episode: Episode, lost: LostRecord) -> None:
        episode.timed_out = lost.timed_out
        self._lose(episode, Failure(reason=lost.reason, kind=lost.kind))


class ReplayGroups(PromptGroups):
    """Groups as a file has them: each with the row that it read, and failed where its environment could not begin."""

    turns: ReplayTurns

    def __init__(self, *, schedule: ReplaySchedule, **options: Any) -> None:
        super().__init__(**options)
        self._schedule = schedule

    def new_group(self, number: int) -> EpisodeGroup:
        """See GroupWork."""
        record = self._schedule.recorded.groups[number]
        replacement = None if record.spare is None else self.plans.spare(self.plans.step_of(number), record.spare)
        return EpisodeGroup(
            number=number, replacement=replacement, spare=record.spare, num_long=record.num_long, is_left_out=record.left_out
        )

    def wants_more(self, group: EpisodeGroup) -> bool:
        """See PromptGroups."""
        return len(group.episodes) < len(self._schedule.recorded.groups[group.number].samples)

    def failed_before(self, number: int) -> Failure | None:
        """See PromptGroups."""
        lost = self._schedule.recorded.groups[number].failed
        return None if lost is None else Failure(reason=lost.reason, kind=lost.kind)

    def begin(
        self, calls: EnvironmentCalls, on_ended: Callable[[int], None], look: Callable[[], None], prompts: PromptEvents
    ) -> None:
        """See GroupWork."""
        self.turns.look_again = look
        super().begin(calls, on_ended, look, prompts)

    def request_next(self, running: Iterable[EpisodeGroup]) -> None:
        """See GroupWork."""
        if self.turns.all_wait(running) and not self.turns.ask_due(self._schedule.trained):
            self._schedule.generated()


@frozen(kw_only=True, eq=False)
class ReplaySampler(EpisodeSampler):
    """Collects the groups of a file."""

    recorded: RolloutTrace

    def schedule(self, policy: SchedulePolicy, position: Position) -> ReplaySchedule:
        """See StepSampler."""
        return ReplaySchedule(policy, self.recorded, position)

    def make_turns(self, schedule: Schedule, **options: Any) -> ReplayTurns:  # noqa: ARG002 - it has the file's
        """See EpisodeSampler."""
        return ReplayTurns(recorded=self.recorded, **options)

    def make_groups(self, schedule: Schedule, **options: Any) -> ReplayGroups:
        """See EpisodeSampler."""
        assert isinstance(schedule, ReplaySchedule), "as `schedule` makes it"
        return ReplayGroups(schedule=schedule, **options)


class ScheduleReplay:
    """See rlcore_rollout.sampler.Replay."""

    def __init__(self, recorded: RolloutTrace) -> None:
        self.recorded = recorded

    def sampler(self, sampler: EpisodeSampler) -> ReplaySampler:
        """See Replay. No clock ends an episode but where it did in the file."""
        parts = {one.name: getattr(sampler, one.name) for one in fields(EpisodeSampler)}
        return ReplaySampler(recorded=self.recorded, **{**parts, "episode_timeout_s": None})

    def replaced(self, step: int) -> Mapping[int, GroupRewards]:
        """See Replay."""
        return {one.number: (one.rewards, one.success) for one in self.recorded.steps[step - 1].replaced}

    def difference(self, record: StepRecord) -> str | None:
        """See Replay."""
        expected = self.recorded.steps[record.step - 1]
        num_in_flight = sum(sample.in_flight for group in expected.groups for sample in group.samples)
        if num_in_flight:
            return f"{num_in_flight} samples saw new weights in the middle of a turn, which no replay repeats"
        if others := differing(record, expected):
            shown = ", ".join(map(str, others[:MAX_SHOWN])) + (", …" if len(others) > MAX_SHOWN else "")
            return (
                f"the tokens of {len(others)} groups are others than the file's ({shown}), by rounding, by an environment that "
                "answered otherwise, or by what differs in recipe, data or model"
            )
        return None

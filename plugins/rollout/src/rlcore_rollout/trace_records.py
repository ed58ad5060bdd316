"""The trace of a step, a line of schedule.jsonl: its samples, and the weight version of each part of them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import evolve, frozen
from cattrs import Converter

from rlcore.schema.constraints import Count, Positive
from rlcore.spi import FailureKind
from rlcore.spi.arrays import Int32Array
from rlcore_rollout.episode import Episode
from rlcore_rollout.episode_group import EpisodeGroup
from rlcore_rollout.schedule import Schedule

DIGEST_BYTES = 8
_CONVERTER = Converter(omit_if_default=True)


@frozen(kw_only=True)
class LostRecord:
    """A sample that its environment failed on, or that took too long."""

    reason: str
    """In words."""
    length: Count
    """The tokens that it had read and said."""
    timed_out: bool = False
    """True where the episode took too long."""
    in_turn: bool = False
    """True where it was lost while it said its last turn."""
    kind: FailureKind = "environment"
    """The failure."""


@frozen(kw_only=True)
class SampleRecord:
    """One sample of a group."""

    turns: tuple[tuple[tuple[Count, Count], ...], ...]
    """The spans of each turn: weight version and number of tokens. A new one begins with other weights, and where the generator
    was stopped in the turn."""
    digest: str
    """BLAKE2b of its tokens, int32, those that it read among them."""
    segments: tuple[Count, ...] = ()
    """The ends of its segments but the last one, among its tokens."""
    in_flight: bool = False
    """True where weights changed in a turn without a stop of the generator."""
    lost: LostRecord | None = None
    """None where it ended by itself."""


@frozen(kw_only=True)
class GroupRecord:
    """One group."""

    number: Count
    """Its number in the run: which row it reads, and with which seeds."""
    began: Count
    """The number of steps that were trained when it began, or began again."""
    samples: tuple[SampleRecord, ...] = ()
    """None where it is left out."""
    spare: Count | None = None
    """Which of the rows behind those of its step it read in place of its own, counted from 0."""
    num_long: Count = 0
    """Rows whose prompts were over the limit."""
    left_out: bool = False
    """True where no row took the place of its own."""

    @property
    def failed(self) -> LostRecord | None:
        """The failure of the environment to begin; None where it began."""
        lost = None if not self.samples or self.samples[0].turns else self.samples[0].lost
        return None if lost is None or lost.timed_out else lost


@frozen(kw_only=True)
class PlanRecord:
    """The rows of a step's groups by number, where they follow from the rewards of earlier ones."""

    step: Count
    """The step, counted from 0."""
    rows: tuple[Count, ...]
    """Their numbers among those within the limits."""
    end: Count
    """The place behind them in the order of the data."""


@frozen(kw_only=True)
class ReplacedRecord:
    """A group that was replaced, of which its row's weight follows."""

    number: Count
    rewards: tuple[float, ...]
    """Its samples' rewards; none where they say nothing of its row."""
    success: float
    """The share of these that solved it."""


@frozen(kw_only=True)
class StepRecord:
    """One step."""

    step: Positive
    """Its number, counted from 1."""
    version: Count
    """The weights that it began with."""
    groups: tuple[GroupRecord, ...]
    """The groups that it trained on, in the order of the batch."""
    next: Count
    """The number of the group that would have begun next."""
    num_open: Count = 0
    """Groups that ran, or had ended, while it trained."""
    num_rescored: Count = 0
    """Tokens that were too old, whose log-probabilities the trainer computed anew."""
    dropped: tuple[Count, ...] = ()
    """Groups that were given up since the step before, being too old."""
    refilled: tuple[Count, ...] = ()
    """Groups that were replaced since then, having no signal."""
    plans: tuple[PlanRecord, ...] = ()
    """The rows that rewards chose since the last step."""
    replaced: tuple[ReplacedRecord, ...] = ()
    """The rewards of the groups of `refilled`, where rows are chosen by them."""

    def as_json(self) -> dict[str, Any]:
        """The record for a JSON file; what has its default value is left out."""
        made: dict[str, Any] = _CONVERTER.unstructure(self)
        return made


def step_record(schedule: Schedule, groups: Sequence[GroupRecord], version: int) -> StepRecord:
    """The step whose batch was taken from a schedule; `version` is that of the weights which it began with."""
    return StepRecord(
        step=schedule.trained + 1,
        version=version,
        groups=tuple(evolve(group, began=schedule.began(group.number)) for group in groups),
        next=schedule.next_number,
        num_open=schedule.num_open,
        dropped=tuple(schedule.dropped),
        refilled=tuple(schedule.refilled),
    )


def group_record(group: EpisodeGroup, reasons: Mapping[int, str]) -> GroupRecord:
    """A group that has ended, but for `began`; `reasons` are why samples failed, by number."""
    return GroupRecord(
        number=group.number,
        began=0,
        samples=tuple(sample_record(episode, reasons.get(episode.number, "")) for episode in group.episodes),
        spare=group.spare,
        num_long=group.num_long,
        left_out=group.is_left_out,
    )


def sample_record(episode: Episode, reason: str) -> SampleRecord:
    """An episode that has ended; `reason` is why it failed, if it did."""
    versions, ranges = np.concatenate(episode.versions), list(episode.turns)
    if episode.partial_turn:
        ranges.append((episode.length - episode.num_partial_tokens, episode.length))
    changed = [place for start, end in ranges for place in _changes(versions, start, end)]
    places = [*changed, *episode.stops]
    lost = None
    if not episode.valid:
        lost = LostRecord(
            reason=reason,
            length=episode.length,
            timed_out=episode.timed_out,
            in_turn=bool(episode.partial_turn),
            kind="environment" if episode.failure is None else episode.failure.kind,
        )
    return SampleRecord(
        turns=tuple(tuple(_spans(versions, places, start, end)) for start, end in ranges),
        digest=hashlib.blake2b(episode.all_tokens().tobytes(), digest_size=DIGEST_BYTES).hexdigest(),
        segments=tuple(segment.end for segment in episode.ended_segments),
        in_flight=not set(changed) <= set(episode.stops),
        lost=lost,
    )


def _spans(versions: Int32Array, places: Sequence[int], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Version and number of tokens of each part of a turn, which new parts begin in at some places."""
    within = {place for place in places if start < place < end}
    for first, last in pairwise(sorted({start, end} | within)):
        yield int(versions[first]), last - first


def _changes(versions: Int32Array, start: int, end: int) -> list[int]:
    """Return the places within a turn at which another version begins; versions never fall within a sample."""
    if versions[start] == versions[end - 1]:
        return []
    places: list[int] = (start + 1 + np.flatnonzero(np.diff(versions[start:end]))).tolist()
    return places

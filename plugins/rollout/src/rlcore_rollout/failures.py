"""failures.jsonl of a run: how the episodes of each step and evaluation ended, and what they moved.

Each line has a step and its entries; those of an evaluation have the outcome "evaluated". An entry counts the episodes of one
kind, outcome and reason; one without a reason counts those that ended by the policy.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from attrs import asdict, define, evolve, field, frozen

from rlcore.files import storage_errors
from rlcore.run.data.text import row_name
from rlcore.run.protocols import CollectedRollouts
from rlcore.secrets import masked
from rlcore.spi import EpisodeFailure, FailureKind, Row, TokenBatch
from rlcore_rollout.environment_results import first_line
from rlcore_rollout.rollout_table import advantages_of

Outcome: TypeAlias = Literal["trained", "masked", "asked again", "dropped", "evaluated"]
"""The outcome of an episode: its reward counted; it was left out of the loss and of its group's statistics; another took its
place; its group was too old for any step; or it answered a held-out row."""
FILE = "failures.jsonl"
MAX_ENTRIES, MAX_ROWS = 32, 8
"""Most entries of a step, and most rows of an entry: the most frequent ones."""
OTHERS = "other reasons"
BY_POLICY = EpisodeFailure(kind="policy")


@frozen(kw_only=True)
class LeftOut:
    """Episodes of one row that no step trains on."""

    outcome: Outcome
    row: int | None
    """The number of the row; None where it is unknown."""
    endings: Sequence[EpisodeFailure | None]
    """The end of each episode; None where by the policy."""


@frozen(kw_only=True)
class StepEndings:
    """Facts about a step's episodes that its samples do not hold."""

    rows: Sequence[str] = ()
    """[G]: the name of each group's row; "" where it is unknown."""
    left_out: Sequence[tuple[str, LeftOut]] = ()
    """Episodes that were left out since the step before, each with the name of its row."""


@define(kw_only=True)
class Entry:
    """Episodes of a step that ended alike."""

    kind: FailureKind
    outcome: Outcome
    reason: str
    """Empty where they ended by the policy."""
    episodes: int = 0
    reward: float = 0.0
    """The sum of their rewards, as far as these counted."""
    generated: int = 0
    """Tokens that the policy generated in them; 0 where no step trains on them."""
    loss_tokens: int = 0
    weight: float | None = None
    """The sum of |advantage| over their loss tokens; None where the algorithm has no advantages, or trains on other sequences
    than were sampled."""
    rows: dict[str, int] = field(factory=dict)
    """The number of them by row."""

    def add(self, other: "Entry") -> None:
        """Count the episodes of another entry."""
        self.episodes += other.episodes
        self.reward += other.reward
        self.generated += other.generated
        self.loss_tokens += other.loss_tokens
        if other.weight is not None:
            self.weight = (self.weight or 0.0) + other.weight
        for row, number in other.rows.items():
            self.rows[row] = self.rows.get(row, 0) + number


def step_entries(sampled: CollectedRollouts, trained: TokenBatch, endings: StepEndings) -> list[Entry]:
    """Return the entries of a step: of its samples, of the batch that it trained on, and of episodes that were left out."""
    found: dict[tuple[str, str, str], Entry] = {}
    for entry in (*_of_samples(sampled, trained, endings.rows), *_of_left_out(endings.left_out)):
        key = (entry.kind, entry.outcome, entry.reason)
        if key in found:
            found[key].add(entry)
        else:
            found[key] = entry
    return _most_frequent(list(found.values()))


def evaluation_entries(answers: CollectedRollouts, rows: Sequence[str]) -> list[Entry]:
    """Return the entries of an evaluation; `rows`, [G], are the names of its rows."""
    return _most_frequent(list(_of_samples(answers, None, rows)))


def ledger_name(rows: Sequence[Row], number: int) -> str:
    """Return the name of a row in entries."""
    return row_name(rows, number).removesuffix(" (the first is 0)")


def append_entries(path: Path, step: int, entries: Sequence[Entry]) -> None:
    """Write the line of a step. Raises StorageError where it cannot be written."""
    told = [asdict(one, filter=lambda _, value: value is not None) for one in entries]
    line = json.dumps({"step": step, "entries": told}, separators=(",", ":"))
    with storage_errors(path.name, path.parent), path.open("a") as file:
        file.write(f"{line}\n")


def _of_samples(sampled: CollectedRollouts, trained: TokenBatch | None, rows: Sequence[str]) -> Iterator[Entry]:
    """Yield an entry for all episodes of a step that ended alike; `trained` is None of those that are only measured."""
    first, episode_of, batch = sampled.first_sequences, sampled.episode_of, sampled.batch
    advantages = None if trained is None else advantages_of(sampled, trained)
    mask = batch.loss_mask if advantages is None or trained is None else trained.loss_mask
    mask = mask & (trained is not None)
    token_episode = np.repeat(episode_of, batch.lengths)[mask]
    loss_tokens = np.bincount(token_episode, minlength=len(first))
    moved = np.zeros(0) if advantages is None else np.abs(advantages[mask]).astype(np.float64)
    weights = None if advantages is None else np.bincount(token_episode, moved, len(first))
    generated = np.add.reduceat(sampled.num_generated, first)
    rewards, groups = sampled.rewards[first].astype(np.float64), sampled.group_ids[first].tolist()
    alike: dict[tuple[EpisodeFailure | None, bool], list[int]] = defaultdict(list)
    failures = sampled.failures or [None] * len(first)
    for number, (is_valid, failure) in enumerate(zip(sampled.valid[first].tolist(), failures, strict=True)):
        alike[failure, is_valid].append(number)
    for (failure, is_valid), numbers in alike.items():
        yield _entry(
            failure,
            "evaluated" if trained is None else "trained" if is_valid else "masked",
            Counter(rows[groups[number]] for number in numbers) if failure and rows else {},
            episodes=len(numbers),
            reward=float(rewards[numbers].sum()),
            generated=int(generated[numbers].sum()),
            loss_tokens=int(loss_tokens[numbers].sum()),
            weight=None if weights is None else float(weights[numbers].sum()),
        )


def _of_left_out(left_out: Sequence[tuple[str, LeftOut]]) -> Iterator[Entry]:
    for row, group in left_out:
        for failure, number in Counter(group.endings).items():
            yield _entry(failure, group.outcome, {row: number} if failure else {}, episodes=number)


def _entry(failure: EpisodeFailure | None, outcome: Outcome, rows: Mapping[str, int], **figures: Any) -> Entry:
    ending = failure or BY_POLICY
    reason = masked(first_line(ending.reason or f"a failure of the kind {ending.kind!r}")) if failure else ""
    named = {row: number for row, number in rows.items() if row}
    return Entry(kind=ending.kind, outcome=outcome, reason=reason, rows=named, **figures)


def _most_frequent(entries: Sequence[Entry]) -> list[Entry]:
    """Return MAX_ENTRIES entries, and one more for the others of each kind and outcome; each has MAX_ROWS rows."""
    ordered = sorted(entries, key=lambda one: -one.episodes if one.reason else -np.inf)
    others: dict[tuple[str, str], Entry] = {}
    for entry in ordered[MAX_ENTRIES:]:
        key = (entry.kind, entry.outcome)
        if key in others:
            others[key].add(entry)
        else:
            others[key] = evolve(entry, reason=OTHERS)
    kept = [*ordered[:MAX_ENTRIES], *others.values()]
    return [evolve(one, rows=_first_rows(one.rows)) for one in kept]


def _first_rows(rows: Mapping[str, int]) -> dict[str, int]:
    return dict(Counter(rows).most_common(MAX_ROWS))

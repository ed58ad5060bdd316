"""failures.jsonl of a run: how the episodes of each step and evaluation ended, and what they moved.

Each line has a step and its entries; those of an evaluation have the outcome "evaluated". An entry counts the episodes of one
kind, outcome and reason; one without a reason counts those that ended by the policy.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from attrs import asdict, define, evolve, field, frozen
from numpy.typing import NDArray

from rlcore.files import storage_errors
from rlcore.run.data.text import row_name
from rlcore.run.protocols import CollectedRollouts
from rlcore.secrets import masked
from rlcore.spi import EpisodeFailure, FailureKind, Row, TokenBatch
from rlcore.spi.arrays import BoolArray, Float32Array
from rlcore_rollout.environment_results import first_line
from rlcore_rollout.rollout_table import advantages_of

Outcome: TypeAlias = Literal["trained", "masked", "asked again", "dropped", "evaluated"]
"""The outcome of an episode: its reward counted; it was left out of the loss and of its group's statistics; another took its
place; its group was too old for any step; or it answered a held-out row."""
FILE = "failures.jsonl"
MAX_ENTRIES, MAX_ROWS = 32, 8
"""Most entries of a step, and most rows of an entry: the most frequent ones."""
BLOCK_TOKENS = 2**16
OTHERS = "other reasons"
BY_POLICY = EpisodeFailure(kind="policy")


@frozen(kw_only=True)
class LeftOut:
    """Episodes of one row that no step trains on."""

    outcome: Outcome
    row: int | None
    """The number of the row; None where it is unknown."""
    endings: Mapping[EpisodeFailure | None, int]
    """The number of episodes by their end; None where by the policy."""


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
    first, batch = sampled.first_sequences, sampled.batch
    advantages = None if trained is None else advantages_of(sampled, trained)
    loss_tokens = np.zeros(len(first), np.int64)
    if trained is not None:
        loss_tokens = np.add.reduceat((batch if advantages is None else trained).loss_lengths, first)
    weights = None if advantages is None or trained is None else np.add.reduceat(_moved(advantages, trained), first)
    generated = np.add.reduceat(sampled.num_generated, first)
    rewards, groups = sampled.rewards[first].astype(np.float64), sampled.group_ids[first].tolist()
    for (failure, is_valid), numbers in _alike(sampled.failures or [None] * len(first), sampled.valid[first]).items():
        of_groups = Counter(map(groups.__getitem__, numbers)) if failure and rows else {}
        yield _entry(
            failure,
            "evaluated" if trained is None else "trained" if is_valid else "masked",
            _summed((rows[group], number) for group, number in of_groups.items()),
            episodes=len(numbers),
            reward=float(rewards[numbers].sum()),
            generated=int(generated[numbers].sum()),
            loss_tokens=int(loss_tokens[numbers].sum()),
            weight=None if weights is None else float(weights[numbers].sum()),
        )


def _summed(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the sum of each name's counts."""
    sums: dict[str, int] = defaultdict(int)
    for name, number in counts:
        sums[name] += number
    return sums


def _alike(failures: Sequence[EpisodeFailure | None], valid: BoolArray) -> dict[tuple[EpisodeFailure | None, bool], list[int]]:
    """Return the episodes that ended alike, ascending. Most failures are the same few objects, whose hashes take long."""
    same: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for number, key in enumerate(zip(map(id, failures), valid.tolist(), strict=True)):
        same[key].append(number)
    alike: dict[tuple[EpisodeFailure | None, bool], list[int]] = defaultdict(list)
    for (_, is_valid), numbers in same.items():
        alike[failures[numbers[0]], is_valid] += numbers
    return {ending: sorted(numbers) for ending, numbers in alike.items()}


def _moved(advantages: Float32Array, trained: TokenBatch) -> NDArray[np.float64]:
    """float64 [N]: the sum of |advantage| over the loss tokens of each sequence."""
    sums = np.empty(trained.num_sequences)
    block = max(1, BLOCK_TOKENS * trained.num_sequences // max(trained.num_tokens, 1))
    for first in range(0, trained.num_sequences, block):  # what the processor's caches hold
        offsets = trained.offsets[first : first + block + 1]
        tokens = slice(int(offsets[0]), int(offsets[-1]))
        counted = np.abs(advantages[tokens]) * trained.loss_mask[tokens]
        np.add.reduceat(counted, offsets[:-1] - offsets[0], dtype=np.float64, out=sums[first : first + block])
    return sums


def _of_left_out(left_out: Sequence[tuple[str, LeftOut]]) -> Iterator[Entry]:
    for row, group in left_out:
        for failure, number in group.endings.items():
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

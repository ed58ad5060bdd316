"""The ledger of failures of a run: failures.jsonl, read and added up."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os.path import lexists
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from attrs import define, evolve, field, frozen

from rlcore.reading import parse_json, read_bytes
from rlcore.schema.structure import structure
from rlcore.spi import CheckpointError, FailureKind

FILE = "failures.jsonl"
KINDS: Sequence[str] = get_args(FailureKind)
Outcome: TypeAlias = Literal["trained", "masked", "asked again", "dropped", "evaluated"]
OUTCOMES: Sequence[str] = get_args(Outcome)
EVALUATED = "evaluated"
COUNTED = ("trained", EVALUATED)
"""Outcomes of episodes whose reward counts."""


@frozen(kw_only=True)
class Entry:
    """Episodes of a step that ended alike, as rlcore-rollout writes them."""

    kind: FailureKind
    outcome: Outcome
    reason: str
    """Empty where they ended by the policy."""
    episodes: int
    reward: float
    """The sum of their rewards, as far as these counted."""
    generated: int
    loss_tokens: int
    weight: float | None = None
    """The sum of |advantage| over their loss tokens; None where it is unknown."""
    rows: Mapping[str, int]
    """The number of them by row."""


@frozen(kw_only=True)
class StepEntries:
    """A line of the file."""

    step: int
    entries: tuple[Entry, ...]


@define(kw_only=True)
class Sums:
    """Episodes of a run that ended alike."""

    episodes: int = 0
    of_outcome: Counter[str] = field(factory=Counter)
    reward: float = 0.0
    """The sum of the rewards of those that were trained on, or measured."""
    generated: int = 0
    loss_tokens: int = 0
    share: float | None = None
    """The mean over steps of their share of the step's sum of |advantage| over loss tokens; None where it is unknown."""
    steps: set[int] = field(factory=set)
    rows: Counter[str] = field(factory=Counter)

    def add(self, entry: Entry, step: int, share: float | None) -> None:
        """Count an entry, with its share of the run's sum of |advantage|."""
        self.episodes += entry.episodes
        self.of_outcome[entry.outcome] += entry.episodes
        self.reward += entry.reward if entry.outcome in COUNTED else 0.0
        self.generated += entry.generated
        self.loss_tokens += entry.loss_tokens
        if share is not None:
            self.share = (self.share or 0.0) + share
        self.steps.add(step)
        self.rows.update(entry.rows)

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of those that were trained on, or measured; None of none."""
        counted = sum(self.of_outcome[outcome] for outcome in COUNTED)
        return self.reward / counted if counted else None

    def as_json(self) -> dict[str, Any]:
        """The sums for a program."""
        return {
            "episodes": self.episodes,
            **{outcome.replace(" ", "_"): self.of_outcome[outcome] for outcome in OUTCOMES},
            "mean_reward": self.mean_reward,
            "advantage_share": self.share,
            "generated_tokens": self.generated,
            "loss_tokens": self.loss_tokens,
        }


@frozen(kw_only=True)
class FailureLedger:
    """All episodes of a run, by kind, and by kind, outcome and reason."""

    num_steps: int
    kinds: Mapping[str, Sums]
    """The kinds that occur, in the order of KINDS."""
    reasons: Mapping[tuple[str, str, str], Sums]
    """Entries by kind, outcome and reason, the most frequent ones first."""
    evaluations: "FailureLedger | None" = None
    """The episodes of evaluations, whose number is then `num_steps`; None where there were none."""

    @property
    def mean_reward(self) -> float | None:
        """The mean reward of all episodes that were trained on; None of none."""
        trained = self._count("trained")
        return sum(one.reward for one in self.kinds.values()) / trained if trained else None

    @property
    def mean_reward_as_zero(self) -> float | None:
        """That mean if every masked episode had counted with a reward of 0."""
        counted = self._count("trained") + self._count("masked")
        return sum(one.reward for one in self.kinds.values()) / counted if counted else None

    def _count(self, outcome: str) -> int:
        return sum(one.of_outcome[outcome] for one in self.kinds.values())

    def as_json(self) -> dict[str, Any]:
        """The ledger for a program."""
        reasons = [
            {
                "kind": kind,
                "outcome": outcome,
                "reason": reason,
                "steps": sorted(sums.steps),
                "rows": dict(sums.rows.most_common()),
                **sums.as_json(),
            }
            for (kind, outcome, reason), sums in self.reasons.items()
        ]
        return {
            "steps": self.num_steps,
            "mean_reward": self.mean_reward,
            "mean_reward_with_masked_as_zero": self.mean_reward_as_zero,
            "kinds": {kind: sums.as_json() for kind, sums in self.kinds.items()},
            "reasons": reasons,
            "evaluations": None if self.evaluations is None else self.evaluations.as_json(),
        }


def read_ledger(directory: Path) -> FailureLedger | None:
    """Return the ledger of a run directory; None where it has no failures.jsonl. CheckpointError, with all lines that are
    wrong, where the file is damaged; a last line that a crash cut short is left out."""
    path = directory / FILE
    return ledger_of(_read(path)) if lexists(path) else None


def ledger_of(lines: Iterable[StepEntries]) -> FailureLedger:
    """Add the lines of a run up, those of evaluations apart."""
    every = list(lines)
    measured = [line for line in every if any(entry.outcome == EVALUATED for entry in line.entries)]
    evaluations = _added_up(measured) if measured else None
    return evolve(_added_up([line for line in every if line not in measured]), evaluations=evaluations)


def _added_up(steps: Sequence[StepEntries]) -> FailureLedger:
    weights = [sum(one.weight or 0.0 for one in line.entries) for line in steps]
    num_weighed = sum(weight > 0 for weight in weights)
    kinds: dict[str, Sums] = {}
    reasons: dict[tuple[str, str, str], Sums] = {}
    for line, total in zip(steps, weights, strict=True):
        for entry in line.entries:
            share = None
            if num_weighed and entry.outcome in ("trained", "masked"):
                share = (entry.weight or 0.0) / total / num_weighed if total else 0.0
            kinds.setdefault(entry.kind, Sums()).add(entry, line.step, share)
            if entry.reason:
                key = (entry.kind, entry.outcome, entry.reason)
                reasons.setdefault(key, Sums()).add(entry, line.step, share)
    frequent = sorted(reasons, key=lambda key: (KINDS.index(key[0]), -reasons[key].episodes, key))
    return FailureLedger(
        num_steps=len(steps),
        kinds={kind: kinds[kind] for kind in KINDS if kind in kinds},
        reasons={key: reasons[key] for key in frequent},
    )


def _read(path: Path) -> Iterator[StepEntries]:
    lines = read_bytes(path).split(b"\n")
    found, faults = [], []
    for number, line in enumerate(lines, start=1):
        try:
            made, problems = structure(parse_json(line), StepEntries, f"line {number}") if line.strip() else (None, [])
        except ValueError as error:
            if number < len(lines):  # the last line may be one that a crash cut short
                faults.append(f"line {number}: found no JSON ({error}); expected a step and its entries")
            continue
        faults += [str(problem) for problem in problems]
        if made is not None:
            found.append(made)
    if faults:
        remedy = "Remove these lines: each counts the episodes of one step."
        raise CheckpointError("\n".join([f"{path} is damaged:", *faults, remedy]))
    yield from found

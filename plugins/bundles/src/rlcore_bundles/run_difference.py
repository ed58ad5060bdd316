"""The place where two runs part: the first step, its first figure, and the first sample and token that differ."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from rlcore.reading import read_bytes, read_toml
from rlcore.run.report.metrics_file import read_metrics_file
from rlcore.run.storage.recipe_changes import recipe_changes
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saved_run import SavedRun
from rlcore.spi import CheckpointError

MEASURED = ("time/", "tokens_per_second", "generated_tokens_per_second", "memory/", "receipts/seconds")
"""Figures that depend on the clock and on the machine."""
COLUMNS = ("prompt", "tokens", "response", "finish_reason", "weight_versions", "generation_logprobs", "reward", "advantages")
"""Columns of saved samples, in the order in which a step makes them."""
FIRST = ("reward", "success", "response", "truncated", "environment/", "advantage", "zero_advantage", "loss", "grad_norm")
"""Beginnings of the names of figures, in the order in which a step makes them. The others follow."""


@frozen(kw_only=True)
class Figure:
    """A figure of a step that differs."""

    name: str
    first: float
    second: float


@frozen(kw_only=True)
class SampleDifference:
    """The first difference of two runs' samples of a step."""

    step: int
    sample: int
    """The number of the sample in the step's table."""
    column: str
    place: int | None
    """The index in the column's list, such as a token's; None for a column of single values."""
    first: object
    second: object


@frozen(kw_only=True)
class RunDifference:
    """The differences of two runs."""

    changes: Sequence[str]
    """Keys of the recipes and versions of packages that differ."""
    num_steps: int
    """Steps that both have."""
    step: int | None
    """The first step with another figure; None where all figures of all steps are equal to the bit."""
    figures: Sequence[Figure]
    """The figures that differ in that step, in the order in which a step makes them."""
    sample: SampleDifference | None
    """None where no step's samples are kept by both, or all are equal."""


def run_difference(first: Path, second: Path) -> RunDifference:
    """Compare two runs. Figures of seconds and memory do not count. CheckpointError where a directory is none of a run."""
    runs = [SavedRun.find(path) for path in (first, second)]
    records = [{int(one["step"]): one for one in read_metrics_file(run.path / "metrics.jsonl")} for run in runs]
    steps = sorted(records[0].keys() & records[1].keys())
    if not steps:
        found = " and ".join(f"{len(of)} steps in {run.path}" for run, of in zip(runs, records, strict=True))
        raise CheckpointError(f"found {found}; expected a step that both have in metrics.jsonl. Name runs that have begun.")
    parted = next((step for step in steps if list(differing_figures(records[0][step], records[1][step]))), None)
    figures = () if parted is None else differing_figures(records[0][parted], records[1][parted])
    return RunDifference(
        changes=list(_changes(*runs)),
        num_steps=len(steps),
        step=parted,
        figures=sorted(figures, key=lambda one: _order(one.name)),
        sample=_sample(*runs),
    )


def _changes(first: SavedRun, second: SavedRun) -> Iterator[str]:
    for run in (first, second):
        read_toml(run.path / "recipe.toml")  # CheckpointError where it is damaged
    texts = [read_bytes(run.path / "recipe.toml").decode() for run in (first, second)]
    yield from (str(change) for change in recipe_changes(*texts))
    versions = [RunDirectory(path=run.path).versions for run in (first, second)]
    yield from (f"{name} {before} -> {after}" for name, before, after in differing_versions(*versions))


def differing_versions(first: Mapping[str, str], second: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """The packages of which two environments have other versions, with both; "none" where one has none."""
    pairs = ((name, first.get(name, "none"), second.get(name, "none")) for name in sorted(first.keys() | second.keys()))
    return [(name, one, other) for name, one, other in pairs if one != other]


def differing_figures(first: Mapping[str, float], second: Mapping[str, float]) -> Iterator[Figure]:
    """Yield the figures that differ, of those that both have."""
    for name in sorted(first.keys() & second.keys()):
        one, other = first[name], second[name]
        if not name.startswith(MEASURED) and one != other and not (math.isnan(one) and math.isnan(other)):
            yield Figure(name=name, first=one, second=other)


def _order(name: str) -> tuple[int, str]:
    return next((number for number, begin in enumerate(FIRST) if name.startswith(begin)), len(FIRST)), name


def _sample(first: SavedRun, second: SavedRun) -> SampleDifference | None:
    """The first difference in the samples of steps that both runs keep."""
    for step in sorted({*first.saved_steps()} & {*second.saved_steps()}):
        tables = [run.samples(step) for run in (first, second)]
        names = [name for name in COLUMNS if all(name in table.column_names for table in tables)]
        before, after = (table.select(names).to_pylist() for table in tables)
        for number in range(max(len(before), len(after))):
            if number >= min(len(before), len(after)):
                return _difference(step, number, "samples", None, len(before), len(after))
            for name in names:
                if (found := _place(before[number][name], after[number][name])) is not None:
                    return _difference(step, number, name, *found)
    return None


def _place(first: Any, second: Any) -> tuple[int | None, object, object] | None:
    """The index and both values of the first difference; None where there is none."""
    if not isinstance(first, list) or not isinstance(second, list):
        return None if first == second else (None, first, second)
    for index in range(max(len(first), len(second))):
        one, other = (values[index] if index < len(values) else None for values in (first, second))
        if one != other:
            return index, one, other
    return None


def _difference(step: int, sample: int, column: str, place: int | None, first: object, second: object) -> SampleDifference:
    return SampleDifference(step=step, sample=sample, column=column, place=place, first=first, second=second)

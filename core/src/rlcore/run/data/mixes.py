"""Rows in limited time, several data sets as one sequence of rows, and several environments as one by the rows' data sets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, islice
from typing import Any

import numpy as np
from attrs import evolve, frozen

from rlcore.registry.plugin_errors import in_time
from rlcore.spi import (
    AgentEnvironment,
    DataError,
    Environment,
    EpisodeResult,
    LazyRows,
    ResetResult,
    Row,
    SessionEndpoint,
    StepResult,
    Turn,
)
from rlcore.spi.arrays import Int64Array

DATA_SET = "data_set"
"""The field of a row that names its set."""
CHUNK_ROWS = 2048
TIMES = 10.0
"""Multiple of the usual time limit for what reads or makes rows."""


def chunks_of(rows: Iterable[Row], key: str = "the data") -> Iterator[tuple[int, list[Row]]]:
    """Yield the rows in order, so many at a time, each with the number of its first. PluginError where a chunk takes too long
    to be read or made; `key` names the data set."""
    iterator: Iterator[Row] | None = None
    start = 0
    while True:
        with in_time(f"taking rows from {start} on of {key}", TIMES):
            iterator = iterator if iterator is not None else iter(rows)
            chunk = list(islice(iterator, CHUNK_ROWS))
        if not chunk:
            return
        yield start, chunk
        start += len(chunk)


def rows_at(rows: Sequence[Row], numbers: Int64Array, key: str = "the data") -> list[Row]:
    """Return the rows of these numbers. PluginError where they take too long; `key` names the data set."""
    with in_time(f"taking {len(numbers)} rows of {key}", TIMES):
        return [rows[number] for number in numbers.tolist()]


class MixedRows(LazyRows):
    """The rows of one set after another."""

    def __init__(self, sets: Mapping[str, Sequence[Row]]) -> None:
        self.sets = sets
        self.starts = (0, *accumulate(map(len, sets.values())))
        """The number of each set's first row, and of the last row plus one."""
        self._names = list(sets)
        super().__init__(self.starts[-1], self._row)

    def __iter__(self) -> Iterator[Row]:
        if self.numbers != range(self.starts[-1]):
            yield from super().__iter__()
            return
        for name, rows in self.sets.items():
            yield from (of_set(row, name) for row in rows)

    def names_of(self, numbers: Int64Array) -> list[str]:
        """The sets of rows, by their numbers."""
        return [self._names[place] for place in np.searchsorted(self.starts, numbers, side="right") - 1]

    def within(self, number: int) -> tuple[Sequence[Row], int]:
        """The set that a row is of, and its number there."""
        place = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.sets[self._names[place]], number - self.starts[place]

    def _row(self, number: int) -> Row:
        rows, own = self.within(number)
        return of_set(rows[own], self.names_of(np.array([number]))[0])


def of_set(row: Row, name: str | None) -> Row:
    """The row with its set's name, where it has one. DataError where it has a field of that name already."""
    if name is None:
        return row
    if DATA_SET in row:
        raise DataError(
            f"found a row of the data set {name!r} with a field {DATA_SET!r} of its own; expected none: what is mixed has the "
            "name of its set there. Rename the field"
        )
    return {**row, DATA_SET: name}


@frozen(kw_only=True, eq=False)
class _Mixed:
    """The base of environments of both kinds."""

    backends: Mapping[str, Any]
    """The environments by name; first the one of rows whose data set names none."""
    of_set: Mapping[str, str]
    """The environment's name of each data set that names one."""

    def name_of(self, row: Row) -> str:
        """The environment of a row."""
        return self.of_set.get(str(row.get(DATA_SET)), next(iter(self.backends)))

    def rows(self, split: str) -> Sequence[Row] | None:
        """Rows that the first environment makes."""
        rows: Sequence[Row] | None = next(iter(self.backends.values())).rows(split)
        return rows

    def close(self) -> None:
        """Close each that can be, whatever one of them raises."""
        with ExitStack() as stack:
            for backend in self.backends.values():
                if (close := getattr(backend, "close", None)) is not None:
                    stack.callback(close)


@frozen(kw_only=True, eq=False)
class MixedEnvironment(_Mixed):
    """Environments that answer turn after turn."""

    backends: Mapping[str, Environment]

    async def reset(self, row: Row, seed: int) -> ResetResult:
        """Begin in the row's environment."""
        name = self.name_of(row)
        found = await self.backends[name].reset(row, seed)
        # What is of another class, the caller refuses.
        return evolve(found, state=(name, found.state)) if isinstance(found, ResetResult) else found

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """Go on there."""
        name, inner = state
        found = await self.backends[name].step(inner, turn)
        return evolve(found, state=(name, found.state)) if isinstance(found, StepResult) else found


@frozen(kw_only=True, eq=False)
class MixedAgents(_Mixed):
    """Environments whose agents run the episodes."""

    backends: Mapping[str, AgentEnvironment]

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        """Run the episode in the row's environment."""
        return await self.backends[self.name_of(row)].run(row, seed, session)

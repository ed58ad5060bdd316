"""Several data sets as one sequence of rows, each with the name of its set."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from rlcore.spi import DataError, LazyRows, Row
from rlcore.spi.arrays import Int64Array

DATA_SET = "data_set"
"""The field of a row that names its set."""


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

"""Rows that are made as they are taken."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Self, overload

from rlcore.spi.environment import Row


class LazyRows(Sequence[Row]):
    """LazyRows(num_rows, make): rows that make(0) to make(num_rows - 1) return, each time one is taken. They cost the memory of
    what they are made from."""

    def __init__(self, num_rows: int, make: Callable[[int], Row], level_of: Callable[[int], int | None] | None = None) -> None:
        """`make` is called with numbers from 0 to num_rows - 1; so is `level_of`, which tells the field `level` of a row
        without making it."""
        self.numbers = range(num_rows)
        """The numbers of these rows; those of a slice are among the whole sequence's."""
        self._make = make
        self.level_of = level_of
        """The function that returns the level of a row by its number; None where the row has to be made."""

    def name_of(self, index: int) -> str:
        """Return how errors call a row."""
        return f"row {index} (the first is 0)"

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> "Row | Self":
        numbers = self.numbers[index]
        if isinstance(numbers, int):
            return self._make(numbers)
        rows = copy(self)
        rows.numbers = numbers
        return rows

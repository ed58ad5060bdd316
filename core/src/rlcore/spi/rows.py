"""Rows that are made as they are taken."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Self, overload

from rlcore.spi.environment import Row


class LazyRows(Sequence[Row]):
    """Rows that `make` makes by number, each time one is taken: they cost the memory of what they are made from."""

    def __init__(self, num_rows: int, make: Callable[[int], Row]) -> None:
        """`make` is called with numbers from 0 to num_rows - 1."""
        self.numbers = range(num_rows)
        """The numbers of these rows; those of a slice are among the whole sequence's."""
        self._make = make

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

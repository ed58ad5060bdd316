"""Levels of difficulty: rows above the present level wait until enough of it is solved."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from attrs import frozen

from rlcore.run.data.mixes import MixedRows
from rlcore.spi import DataError, LazyRows, Row
from rlcore.spi.arrays import BoolArray, Int64Array

LEVEL = "level"
"""The field of a row that says its level."""
NO_LEVEL = -1
"""The level of rows without one, which never wait."""


@frozen(kw_only=True)
class LevelState:
    """The state of the levels in a checkpoint."""

    level: int
    solved: tuple[float, ...]
    """The success of the last groups of this level, the oldest first."""


class Levels:
    """The present level, which rises once the mean success of its last `window` groups is at least `threshold`."""

    def __init__(self, of_row: Int64Array, threshold: float, window: int) -> None:
        """`of_row` int64 [num_rows], of which one has a level at least."""
        self._of_row = of_row
        self._all = np.unique(of_row[of_row != NO_LEVEL])
        self._threshold = threshold
        self._window = window
        self.begin(None)

    def begin(self, saved: LevelState | None) -> None:
        """Begin at the lowest level, or from what `state` returned."""
        present = self._all if saved is None else self._all[self._all <= saved.level]
        self.level = int(self._all[0] if saved is None or not len(present) else present[-1])
        self._solved = deque(() if saved is None else saved.solved, self._window)

    def state(self) -> LevelState:
        """Return the state to begin from later."""
        return LevelState(level=self.level, solved=tuple(self._solved))

    def is_open(self, rows: Int64Array) -> BoolArray:
        """bool [rows]: which of these do not wait."""
        return self._of_row[rows] <= self.level

    def learn(self, row: int, success: float) -> None:
        """Take note of a group's share of solved samples; of other levels than the present one nothing follows."""
        if self._of_row[row] != self.level:
            return
        self._solved.append(success)
        higher = self._all[self._all > self.level]
        if len(self._solved) == self._window and np.mean(self._solved) >= self._threshold and len(higher):
            self.level = int(higher[0])
            self._solved.clear()


def levels_of(rows: Sequence[Row], numbers: Int64Array) -> Int64Array:
    """int64 [numbers]: the levels of these rows. DataError where none has one, or one is no number."""
    found = [_level_of(rows, number) for number in numbers.tolist()]
    for number, level in zip(numbers.tolist(), found, strict=True):
        if level is not None and (type(level) is not int or level < 0):
            raise DataError(
                f"data.curriculum_threshold: found the level {level!r:.40} in row {number}; expected an integer from 0 on"
            )
    if all(level is None for level in found):
        raise DataError(
            f"data.curriculum_threshold: found no row with a {LEVEL!r}; expected some. An environment adds it "
            "where its section asks for levels; a file has it as a field of this name"
        )
    return np.array([NO_LEVEL if level is None else level for level in found], np.int64)


def _level_of(rows: Sequence[Row], number: int) -> object:
    """Without making the row, where it can be told."""
    if isinstance(rows, MixedRows):
        return _level_of(*rows.within(rows.numbers[number]))
    if isinstance(rows, LazyRows) and rows.level_of is not None:
        return rows.level_of(rows.numbers[number])
    return rows[number].get(LEVEL)

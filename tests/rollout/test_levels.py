"""Levels that rise with success, and the rows that wait for them."""

import numpy as np
import pytest

from rlcore.run.data.mixes import MixedRows
from rlcore.run.data.prompt_stream import PromptStream
from rlcore.spi import DataError, LazyRows
from rlcore_rollout.curriculum import Curriculum
from rlcore_rollout.levels import NO_LEVEL, Levels, LevelState, levels_of

OF_ROW = np.array([2, 0, 5, NO_LEVEL, 0, 2])


def test_a_level_rises_once_its_last_groups_are_solved_often_enough():
    levels = Levels(OF_ROW, threshold=0.75, window=2)
    assert levels.is_open(np.arange(6)).tolist() == [False, True, False, True, True, False]
    for success in (1.0, 0.0, 0.5):
        levels.learn(1, success)
    assert levels.level == 0
    levels.learn(4, 1.0)
    assert levels.level == 2, "the level that rows have next"
    levels.learn(1, 1.0)  # of a level that is past
    levels.learn(0, 1.0)
    assert (levels.level, levels.state().solved) == (2, (1.0,))
    for _ in range(3):
        levels.learn(5, 1.0)
    assert levels.level == 5
    for _ in range(3):
        levels.learn(2, 1.0)
    assert levels.level == 5, "the highest"


def test_what_was_saved_goes_on_as_it_would_have():
    levels = Levels(OF_ROW, threshold=1.0, window=3)
    levels.learn(1, 1.0)
    levels.learn(4, 1.0)
    other = Levels(OF_ROW, threshold=1.0, window=3)
    other.begin(levels.state())
    for one in (levels, other):
        one.learn(1, 1.0)
    assert levels.level == other.level == 2


@pytest.mark.parametrize(("saved", "level"), [(0, 1), (1, 1), (2, 1), (3, 3), (9, 7)])
def test_a_saved_level_that_no_row_has_goes_on_from_the_one_below(saved, level):
    levels = Levels(np.array([1, 3, 7]), threshold=0.5, window=1)
    levels.begin(LevelState(level=saved, solved=()))
    assert levels.level == level


def test_levels_are_told_without_making_rows():
    def make(number):
        raise AssertionError("made")

    lazy = LazyRows(8, make, lambda number: number // 4)
    assert levels_of(lazy, np.array([1, 5])).tolist() == [0, 1]
    assert levels_of(lazy[3:], np.array([0, 1])).tolist() == [0, 1]
    mixed = MixedRows({"a": [{"level": 3}, {"prompt": "x"}], "b": lazy})
    assert levels_of(mixed, np.array([0, 1, 2, 7])).tolist() == [3, NO_LEVEL, 0, 1]


@pytest.mark.parametrize(("rows", "text"), [([{"level": "hard"}], "'hard' in row 0"), ([{}, {}], "no row with a 'level'")])
def test_rows_without_levels_are_refused(rows, text):
    with pytest.raises(DataError, match=text):
        levels_of(rows, np.arange(len(rows)))


def test_steps_take_open_rows_alone_and_spares_come_from_them_first():
    of_row = np.arange(40) % 4
    curriculum = Curriculum(
        PromptStream(num_rows=40, batch_size=6, seed=0, shuffle=True), 1.0, Levels(of_row, threshold=0.5, window=6)
    )
    for step in range(4):
        rows = curriculum.indices(step)
        assert curriculum.metrics()["data/level"] == step
        assert of_row[rows].max() <= step
        assert (np.diff(of_row[curriculum.following(step)] > step).astype(int) >= 0).all()
        present = [number for number, row in enumerate(rows.tolist(), 6 * step) if of_row[row] == step]
        groups = dict.fromkeys(present, 1.0)
        while curriculum.metrics()["data/level"] == step and step < 3:
            curriculum.learn({}, groups)
    again = Curriculum(
        PromptStream(num_rows=40, batch_size=6, seed=0, shuffle=True), 1.0, Levels(of_row, threshold=0.5, window=6)
    )
    again.begin(4, curriculum.state())
    assert again.indices(4).tolist() == curriculum.indices(4).tolist()

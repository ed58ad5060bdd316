"""Ragged rows are taken, put and joined as an index to every element would do it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi.arrays import gather_ragged, offsets_of, put_rows, take_rows

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=30)


@settings(deadline=None)
@given(lengths=LENGTHS, data=st.data(), dtype=st.sampled_from([np.bool_, np.int32, np.float32, np.int64]))
def test_rows_equal_those_that_an_index_gathers(lengths: list[int], data: st.DataObject, dtype: type) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    column = np.random.default_rng(len(lengths)).integers(0, 2**31, offsets[-1]).astype(dtype)
    indices = np.asarray(data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=40)), np.int64)
    taken = take_rows(column, offsets, indices)
    assert taken.dtype == dtype
    np.testing.assert_array_equal(taken, column[gather_ragged(offsets, indices)[0]])


@pytest.mark.parametrize("column", [np.arange(24, dtype=np.int32)[::2], np.arange(12, dtype=np.int32)])
def test_rows_are_a_copy_that_may_be_changed(column: np.ndarray) -> None:
    before = column.copy()
    taken = take_rows(column, np.asarray([0, 4, 12], np.int64), np.asarray([1, 0], np.int64))
    assert taken.tolist() == [*before[4:], *before[:4]]
    taken[:] = -1
    np.testing.assert_array_equal(column, before)


@settings(deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_rows_that_were_taken_go_back_to_their_places(lengths: list[int], data: st.DataObject) -> None:
    offsets = offsets_of(lengths)
    column = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    indices = np.asarray(data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True)), np.int64)
    taken = take_rows(column, offsets, indices)
    placed = put_rows([taken[:3], taken[3:]], offsets, indices)
    chosen = np.repeat(np.isin(np.arange(len(lengths)), indices), lengths)
    assert placed.dtype == column.dtype
    np.testing.assert_array_equal(placed, np.where(chosen, column, 0))

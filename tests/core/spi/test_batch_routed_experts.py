"""Columns with more than one number a token, and the record of where tokens went."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import ROUTED_EXPERTS, ContractError, TokenBatch
from rlcore.spi.arrays import gather_ragged, offsets_of, take_rows

LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=12)


def column_of(lengths, shape=(3, 2)):
    num_tokens = sum(lengths)
    return np.arange(num_tokens * np.prod(shape), dtype=np.int16).reshape(num_tokens, *shape)


@settings(deadline=None)
@given(lengths=LENGTHS, data=st.data())
def test_wide_rows_are_taken_as_narrow_ones(lengths, data):
    offsets, column = offsets_of(lengths), column_of(lengths)
    indices = np.asarray(data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True)), np.int64)
    taken = take_rows(column, offsets, indices)
    np.testing.assert_array_equal(taken, column[gather_ragged(offsets, indices)[0]])


def batch_of(column):
    return TokenBatch(
        tokens=np.arange(6, dtype=np.int32),
        offsets=np.array([0, 2, 6]),
        loss_mask=np.zeros(6, np.bool_),
        token_columns={ROUTED_EXPERTS: column},
    )


def test_a_batch_carries_them_along():
    column = column_of([2, 4])
    chosen = batch_of(column).select(np.array([1, 0]))
    np.testing.assert_array_equal(chosen.token_columns[ROUTED_EXPERTS], np.concatenate([column[2:], column[:2]]))


@pytest.mark.parametrize(
    ("column", "found"),
    [(column_of([5]), r"shape \[5, 3, 2\] of int16"), (column_of([6]).astype(np.float16), r"shape \[6, 3, 2\] of float16")],
)
def test_columns_of_another_form_are_refused(column, found):
    with pytest.raises(ContractError, match=f"{ROUTED_EXPERTS}: found {found}; expected \\[6\\]"):
        batch_of(column)

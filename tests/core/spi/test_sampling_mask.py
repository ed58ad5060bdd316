"""What each token was chosen among: parts, whole sequences of it, and what is wrong with it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import ContractError, RaggedTokens, SamplingMask, TokenBatch
from rlcore.spi.arrays import offsets_of

ROWS = st.lists(st.lists(st.integers(0, 30), max_size=4, unique=True), max_size=12)


def mask_of(rows: list[list[int]]) -> SamplingMask:
    return SamplingMask.of([np.array(row, np.int32) for row in rows])


def rows_of(mask: SamplingMask) -> list[list[int]]:
    return [mask.tokens[start:end].tolist() for start, end in zip(mask.offsets[:-1], mask.offsets[1:], strict=True)]


@given(rows=ROWS, data=st.data())
def test_parts_of_it_are_those_of_its_rows(rows: list[list[int]], data: st.DataObject) -> None:
    mask = mask_of(rows)
    assert rows_of(mask) == rows
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    assert rows_of(mask.slice(start, end)) == rows[start:end]
    assert rows_of(SamplingMask.join([mask.slice(0, start), mask.slice(start, len(rows))])) == rows
    assert rows_of(SamplingMask.join([SamplingMask.whole(2), mask])) == [[], [], *rows]


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_sequences_take_their_rows_along(lengths: list[int], data: st.DataObject) -> None:
    total = sum(lengths)
    rows = [data.draw(st.lists(st.integers(0, 30), max_size=3, unique=True)) for _ in range(total)]
    packed = RaggedTokens(tokens=np.arange(total, dtype=np.int32), offsets=offsets_of(lengths))
    batch = TokenBatch(
        tokens=packed.tokens, offsets=packed.offsets, loss_mask=np.zeros(total, np.bool_), sampling_mask=mask_of(rows)
    )
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=6))
    selected = batch.select(np.array(chosen, np.int64))
    assert selected.sampling_mask is not None
    assert rows_of(selected.sampling_mask) == [rows[token] for token in selected.tokens.tolist()]


def test_each_row_has_its_token() -> None:
    tokens = np.array([3, 5, 7], np.int32)
    mask_of([[1, 3], [], [7]]).check(tokens)
    for rows, found in (([[1, 3], [4], [7]], "0 times"), ([[3, 3], [], [7]], "2 times")):
        with pytest.raises(ContractError, match=found):
            mask_of(rows).check(tokens)


def test_it_is_of_all_tokens_of_a_batch() -> None:
    with pytest.raises(ContractError, match="rows for 2 tokens; expected 3"):
        TokenBatch(
            tokens=np.zeros(3, np.int32),
            offsets=np.array([0, 3]),
            loss_mask=np.zeros(3, np.bool_),
            sampling_mask=SamplingMask.whole(2),
        )
    with pytest.raises(ContractError, match="sampling mask"):
        SamplingMask(tokens=np.zeros(2, np.int64), offsets=np.array([0, 2]))  # type: ignore[arg-type]

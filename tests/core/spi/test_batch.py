"""Packed token data: construction, selection, counts, and what is refused."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import ContractError, GlobalCounts, RaggedTokens, TokenBatch
from rlcore.spi.arrays import check_array, check_offsets, gather_ragged

token_lists = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=6)


def batch_of(sequences, masks=None):
    """A batch with one column of each kind, whose values are the token's and the sequence's number."""
    packed = RaggedTokens.from_lists(sequences)
    mask = np.concatenate(masks) if masks else np.ones(len(packed.tokens), np.bool_)
    mask[packed.offsets[:-1]] = False
    return TokenBatch(
        tokens=packed.tokens,
        offsets=packed.offsets,
        loss_mask=mask,
        token_columns={"position": np.arange(len(packed.tokens), dtype=np.int32)},
        sequence_columns={"number": np.arange(len(sequences), dtype=np.float64)},
    )


GOOD = batch_of([[1, 2, 3], [4], [5, 6]])


@settings(deadline=None)
@given(token_lists)
def test_packing_keeps_every_sequence(sequences):
    packed = RaggedTokens.from_lists(sequences)
    assert packed.num_sequences == len(sequences)
    assert packed.lengths.tolist() == [len(sequence) for sequence in sequences]
    assert [packed.sequence(index).tolist() for index in range(len(sequences))] == sequences


def test_packing_nothing_gives_an_empty_batch():
    packed = RaggedTokens.from_lists([])
    assert (packed.num_sequences, packed.tokens.dtype, packed.offsets.tolist()) == (0, np.int32, [0])
    with pytest.raises(ContractError, match="sequence 1 has length 0"):
        RaggedTokens.from_lists([[1], []])


@settings(deadline=None)
@given(token_lists, st.data())
def test_selection_equals_a_loop_over_sequences(sequences, data):
    masks = [np.array(data.draw(st.lists(st.booleans(), min_size=len(s), max_size=len(s)))) for s in sequences]
    batch = batch_of(sequences, masks)
    indices = np.array(data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=8)), np.int64)
    selected = batch.select(indices)
    bounds = [slice(batch.offsets[index], batch.offsets[index + 1]) for index in indices]
    assert selected.num_sequences == len(indices)
    assert selected.lengths.tolist() == [len(sequences[index]) for index in indices]
    assert selected.tokens.tolist() == [token for index in indices for token in sequences[index]]
    assert selected.loss_mask.tolist() == [bit for bound in bounds for bit in batch.loss_mask[bound]]
    positions = [position for bound in bounds for position in batch.token_columns["position"][bound]]
    assert selected.token_columns["position"].tolist() == positions
    assert selected.sequence_columns["number"].tolist() == indices.tolist()
    assert selected.tokens.dtype == np.int32
    assert selected.offsets.dtype == np.int64


@settings(deadline=None)
@given(token_lists, st.permutations(range(6)))
def test_counts_do_not_depend_on_order_and_add_up(sequences, order):
    batch = batch_of(sequences)
    indices = np.array([index for index in order if index < len(sequences)], np.int64)
    whole = batch.counts()
    assert batch.select(indices).counts() == whole
    parts = [batch.select(np.array([index])).counts() for index in indices]
    assert sum(part.num_loss_tokens for part in parts) == whole.num_loss_tokens
    assert sum(part.num_loss_sequences for part in parts) == whole.num_loss_sequences


def test_loss_tokens_of_each_sequence():
    assert GOOD.loss_lengths.tolist() == [2, 0, 1]
    assert GOOD.select(np.zeros(0, np.int64)).loss_lengths.tolist() == []


def test_counts_of_a_known_batch():
    assert GOOD.counts() == GlobalCounts(num_loss_tokens=3, num_loss_sequences=2)
    assert GOOD.select(np.zeros(0, np.int64)).counts() == GlobalCounts(num_loss_tokens=0, num_loss_sequences=0)


def test_a_column_is_added_without_touching_the_batch():
    added = GOOD.with_token_column("advantages", np.zeros(6, np.float32))
    assert set(added.token_columns) == {"position", "advantages"}
    assert set(GOOD.token_columns) == {"position"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": GOOD.tokens.astype(np.int64)}, r"tokens: found shape \[6\] of int64; expected \[any\] of int32"),
        ({"tokens": GOOD.tokens.tolist()}, "tokens: found list; expected a numpy array of int32"),
        ({"tokens": GOOD.tokens[None]}, r"tokens: found shape \[1, 6\]"),
        ({"offsets": GOOD.offsets.astype(np.int32)}, "offsets: found shape .* of int32; expected .* of int64"),
        ({"offsets": np.array([0, 3, 4, 5])}, "expected to start at 0, end at 6"),
        ({"offsets": np.array([1, 3, 4, 6])}, "expected to start at 0, end at 6"),
        ({"offsets": np.array([0, 4, 3, 6])}, "sequence 1 has length -1; expected lengths of at least 1"),
        ({"offsets": np.array([0, 3, 3, 6])}, "sequence 1 has length 0; expected lengths of at least 1"),
        ({"offsets": np.zeros(0, np.int64)}, "offsets"),
        ({"loss_mask": GOOD.loss_mask[:-1]}, r"loss_mask: found shape \[5\] of bool; expected \[6\] of bool"),
        ({"loss_mask": GOOD.loss_mask.astype(np.int32)}, "loss_mask: found .* of int32"),
        ({"loss_mask": np.array([0, 1, 1, 1, 0, 1], np.bool_)}, "loss_mask: True at the first token of sequence 1"),
        ({"token_columns": {"x": np.zeros(5, np.float32)}}, r"token column x: found shape \[5\] of float32; expected \[6\]"),
        ({"token_columns": {"x": np.zeros(6, np.float16)}}, "token column x: found .* of float16; expected"),
        ({"sequence_columns": {"x": np.array(["a"] * 3, object)}}, r"sequence column x: found \[3\] of object; expected \[3\]"),
        ({"sequence_columns": {"x": np.zeros(6)}}, r"sequence column x: found \[6\] of float64; expected \[3\]"),
    ],
)
def test_what_is_not_a_packed_batch_is_refused(changes, text):
    with pytest.raises(ContractError, match=text):
        evolve(GOOD, **changes)


def test_contract_errors_are_value_errors():
    with pytest.raises(ValueError, match="x: found shape"):
        check_array("x", np.zeros(2), np.float32, 2)


def test_offsets_may_allow_empty_sequences():
    check_offsets("offsets", np.array([0, 0, 2]), 2, allow_empty=True)
    with pytest.raises(ContractError, match="at least 0"):
        check_offsets("offsets", np.array([0, 3, 2]), 2, allow_empty=True)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_gathering_ragged_rows_equals_concatenating_them(lengths, data):
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    indices = np.array(data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8)), np.int64)
    positions, gathered = gather_ragged(offsets, indices)
    expected = [list(range(offsets[index], offsets[index + 1])) for index in indices]
    assert positions.tolist() == [position for row in expected for position in row]
    assert np.diff(gathered).tolist() == [len(row) for row in expected]


@pytest.mark.parametrize("kind", ["token_columns", "sequence_columns"])
def test_columns_are_numpy_arrays(kind):
    with pytest.raises(ContractError, match="column odd: found list"):
        evolve(GOOD, **{kind: {"odd": [1.0] * 6}})

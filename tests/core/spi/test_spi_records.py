"""Records that check themselves, the digest of a tensor, and the errors."""

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlcore.spi import (
    ConfigError,
    ContractError,
    GenerateRequest,
    GenerateResult,
    Problem,
    Provider,
    RaggedTokens,
    RolloutBatch,
    SamplingParams,
    TokenBatch,
    tensor_digest,
)
from rlcore.spi.errors import RlcoreError

REQUEST = GenerateRequest(
    prompts=RaggedTokens.from_lists([[1, 2], [3]]),
    num_samples=2,
    seeds=np.arange(4, dtype=np.int64),
    max_tokens=np.full(4, 3, np.int32),
    sampling=SamplingParams(),
    weight_version=0,
)
RESULT = GenerateResult(
    tokens=np.array([1, 2, 3], np.int32),
    offsets=np.array([0, 3, 3], np.int64),
    logprobs=np.zeros(3, np.float32),
    weight_versions=np.zeros(3, np.int32),
    finish_reasons=np.array([0, 2], np.uint8),
)
BATCH = TokenBatch(
    tokens=np.array([1, 2], np.int32),
    offsets=np.array([0, 2]),
    loss_mask=np.array([False, True]),
    sequence_columns={"group_ids": np.zeros(1, np.int32)},
)
TWO = BATCH.select(np.zeros(2, np.int64))
ROLLOUTS = RolloutBatch(
    batch=BATCH,
    rewards=np.zeros(1, np.float32),
    valid=np.ones(1, np.bool_),
    finish_reasons=np.zeros(1, np.uint8),
)
TWO_ROLLOUTS = RolloutBatch(
    batch=TWO,
    rewards=np.zeros(2, np.float32),
    valid=np.ones(2, np.bool_),
    finish_reasons=np.zeros(2, np.uint8),
)


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        (REQUEST, {"seeds": np.arange(3, dtype=np.int64)}),
        (REQUEST, {"seeds": np.arange(4, dtype=np.int32)}),
        (REQUEST, {"seeds": np.array([0, 1, 2, -1])}),
        (REQUEST, {"max_tokens": np.array([3, 3, 0, 3], np.int32)}),
        (REQUEST, {"max_tokens": np.full(4, 3, np.int64)}),
        (REQUEST, {"num_samples": 3}),
        (RESULT, {"tokens": RESULT.tokens.astype(np.int64)}),
        (RESULT, {"offsets": np.array([0, 2])}),
        (RESULT, {"logprobs": np.zeros(2, np.float32)}),
        (RESULT, {"logprobs": np.zeros(3)}),
        (RESULT, {"weight_versions": np.zeros(3, np.int64)}),
        (RESULT, {"finish_reasons": np.zeros(2, np.int64)}),
        (RESULT, {"finish_reasons": np.zeros(3, np.uint8)}),
        (ROLLOUTS, {"rewards": np.zeros(1)}),
        (ROLLOUTS, {"rewards": np.zeros(2, np.float32)}),
        (ROLLOUTS, {"rewards": np.array([np.nan], np.float32)}),
        (TWO_ROLLOUTS, {"batch": evolve(TWO, sequence_columns={"group_ids": np.array([1, 0], np.int32)})}),
        (ROLLOUTS, {"batch": evolve(BATCH, sequence_columns={"group_ids": np.zeros(1, np.int64)})}),
        (ROLLOUTS, {"batch": evolve(BATCH, sequence_columns={})}),
        (ROLLOUTS, {"valid": np.ones(1, np.int32)}),
        (ROLLOUTS, {"finish_reasons": np.zeros(1, np.int32)}),
    ],
)
def test_records_refuse_arrays_of_the_wrong_shape_dtype_or_range(record, changes):
    with pytest.raises(ContractError) as raised:
        evolve(record, **changes)
    (name,) = changes
    name = "group_ids" if name == "batch" else name
    assert name in str(raised.value) or name in ("offsets", "num_samples")


def words_of(array):
    raw = np.ascontiguousarray(array).tobytes()
    raw += bytes(-len(raw) % 4)
    return [int.from_bytes(raw[start : start + 4], "little", signed=True) for start in range(0, len(raw), 4)]


shapes = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)


@settings(deadline=None)
@given(arrays.arrays(st.sampled_from([np.float32, np.float16, np.uint8, np.int64]), shapes))
def test_a_digest_equals_its_definition_in_whole_numbers(array):
    expected = sum(word * (2 * index + 1) for index, word in enumerate(words_of(array))) % 2**64
    assert tensor_digest(array) == expected


@settings(deadline=None)
@given(arrays.arrays(np.int32, st.integers(1, 20)), st.data())
def test_one_changed_word_changes_the_digest(array, data):
    index = data.draw(st.integers(0, len(array) - 1))
    changed = array.copy()
    changed[index] = data.draw(st.integers(-(2**31), 2**31 - 1).filter(lambda value: value != array[index]))
    assert tensor_digest(changed) != tensor_digest(array)


def test_a_digest_depends_on_values_not_on_memory_layout():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert tensor_digest(np.asfortranarray(array)) == tensor_digest(array)
    assert tensor_digest(array.T) != tensor_digest(array)
    assert tensor_digest(array[:, ::2]) == tensor_digest(array[:, ::2].copy())


def test_a_digest_sees_swapped_words_and_does_not_overflow():
    array = np.full(1000, -(2**31), np.int32)
    assert 0 <= tensor_digest(array) < 2**64
    swapped = np.array([2, 1, 3], np.int32)
    assert tensor_digest(swapped) != tensor_digest(np.array([1, 2, 3], np.int32))


def test_a_providers_names_may_come_in_any_collection():
    provider = Provider(name="x", spi=(2, 0), config=object, backend="m:B", capabilities=["top_k"], devices={"cuda"})
    assert provider.capabilities == frozenset({"top_k"})
    assert provider.devices == frozenset({"cuda"})
    assert provider.unavailable() is None


def test_an_error_with_problems_lists_all_of_them():
    problems = [Problem(path="a", found="1", expected="2"), Problem(path="b", found="x", expected="y", remedy="Write y.")]
    error = ConfigError(problems)
    assert isinstance(error, RlcoreError)
    assert error.problems == tuple(problems)
    assert str(error).splitlines() == [
        "2 problem(s) in the recipe:",
        "  - a: found 1; expected 2",
        "  - b: found x; expected y. Write y.",
    ]

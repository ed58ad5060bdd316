"""The digest of a tensor."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rlcore.spi import (
    tensor_digest,
)


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

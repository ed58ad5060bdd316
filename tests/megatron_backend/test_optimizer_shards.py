"""The boxes of a flat shard."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore_megatron.training.optimizer_shards import boxes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_boxes_are_the_run_of_elements(shape: list[int], data: st.DataObject) -> None:
    whole = np.arange(np.prod(shape)).reshape(shape)
    first = data.draw(st.integers(0, whole.size))
    beyond = data.draw(st.integers(first, whole.size))
    found = [
        whole[tuple(slice(begin, begin + size) for begin, size in zip(offset, sizes, strict=True))].ravel()
        for offset, sizes in boxes(shape, first, beyond)
    ]
    assert np.concatenate([[], *found]).tolist() == list(range(first, beyond))
    assert len(found) <= 2 * len(shape) - 1

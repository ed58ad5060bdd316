"""Buckets of tensors: their order and their limit."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import tensor_digest as numpy_digest
from rlcore_torchkit.refit.digest import make_buckets


@given(sizes=st.lists(st.integers(1, 40), max_size=20), limit=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_buckets_keep_order_and_limit(sizes: list[int], limit: int) -> None:
    tensors = {f"t{index}": torch.full((size,), float(index)) for index, size in enumerate(sizes)}
    buckets = list(make_buckets(tensors.items(), limit))
    assert [named.name for bucket in buckets for named in bucket.tensors] == list(tensors)
    for bucket in buckets:
        assert len(bucket.tensors) == 1 or sum(named.tensor.nbytes for named in bucket.tensors) <= limit
        for named in bucket.tensors:
            assert named.digest == numpy_digest(np.asarray(named.tensor))
    for bucket, following in itertools.pairwise(buckets):
        first = following.tensors[0].tensor.nbytes
        assert sum(named.tensor.nbytes for named in bucket.tensors) + first > limit


def test_buckets_read_no_further_than_they_need() -> None:
    read = []

    def source() -> object:
        for index in range(10):
            read.append(index)
            yield f"t{index}", torch.zeros(1)

    next(make_buckets(source(), 8))
    assert read == [0, 1, 2]

"""Buckets and digests of what leaves the trainer."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from rlcore.spi import tensor_digest
from rlcore_mlx.export import digest_of, make_buckets

WEIGHTS = {"a": mx.arange(10, dtype=mx.float32), "b": mx.ones((3, 7)), "c": mx.full((5,), 0.1)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_digests_are_those_of_the_bytes(dtype):
    """Those that torch reads, also where they fill no whole words."""
    for weight in WEIGHTS.values():
        tensor = weight.astype(getattr(mx, dtype))
        raw = torch.as_tensor(tensor).view(torch.uint8).reshape(-1).numpy() if tensor.size else np.zeros(0, np.uint8)
        assert digest_of(tensor) == tensor_digest(raw)


@pytest.mark.parametrize(("most", "expected"), [(1, ["a", "b", "c"]), (130, ["ab", "c"]), (1000, ["abc"])])
def test_buckets_hold_at_most_their_bytes(most, expected):
    buckets = list(make_buckets(WEIGHTS, "float32", most))
    assert ["".join(named.name for named in bucket.tensors) for bucket in buckets] == expected


def test_a_dtype_that_is_asked_for_is_the_one_that_comes():
    (bucket,) = make_buckets(WEIGHTS, "bfloat16", 1000)
    assert {str(torch.as_tensor(named.tensor).dtype) for named in bucket.tensors} == {"torch.bfloat16"}

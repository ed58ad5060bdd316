"""float32 masters as bfloat16 weights and what is left."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore_torchkit.optimizer.one_pass import divided, joined


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_weights_and_remainders_hold_every_bit(patterns: list[int]) -> None:
    masters = torch.from_numpy(np.array(patterns, np.uint32).view(np.float32))
    weights, remainders = divided(masters)
    assert (weights.dtype, remainders.dtype) == (torch.bfloat16, torch.int16)
    again = joined(weights, remainders)
    assert torch.equal(again.isnan(), masters.isnan())
    assert torch.equal(again.view(torch.int32)[~masters.isnan()], masters.view(torch.int32)[~masters.isnan()])


def test_what_is_no_number_becomes_no_weight() -> None:
    """A carry would make a zero of the NaN that GPUs compute."""
    masters = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert bool(divided(masters)[0].isnan().all())


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50))
def test_weights_are_the_nearest(values: list[float]) -> None:
    masters = torch.tensor(values, dtype=torch.float32)
    nearest = (masters.bfloat16().double() - masters.double()).abs()
    assert torch.equal((divided(masters)[0].double() - masters.double()).abs(), nearest)

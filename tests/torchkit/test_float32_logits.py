"""Products in float32 of factors in half precision."""

import torch

from rlcore_torchkit.head.float32_logits import float32_logits


def test_nothing_is_rounded_but_the_sum():
    random = torch.Generator().manual_seed(0)
    states, head = torch.randn(5, 64, generator=random).bfloat16(), torch.randn(7, 64, generator=random).bfloat16()
    found = float32_logits(states, head)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), states.double() @ head.double().T, rtol=0, atol=1e-4)

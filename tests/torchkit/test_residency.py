"""Memory that is discarded and comes back."""

import torch

from rlcore_torchkit.residency import Discarded, num_bytes


def test_discarded_memory_comes_back_as_zeros_underneath_its_views() -> None:
    whole = torch.ones(8)
    half, discarded = whole[4:], Discarded()
    for _ in range(2):
        discarded.discard([whole, half])
        discarded.discard([half])
        assert num_bytes([whole, half]) == 0
        discarded.restore()
        half += 1.0
        assert whole.tolist() == [0.0] * 4 + [1.0] * 4

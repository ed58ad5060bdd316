"""Squared norms of gradients in float64, in parts that keep their copies small."""

import torch
from torch import Tensor

ELEMENTS = 1 << 24
"""Most elements that are copied to float64 at a time."""


def squared_sum(gradient: Tensor) -> Tensor:
    """float64 scalar: the sum of the squares of a gradient's elements."""
    parts = (part.double().square().sum() for part in torch.split(gradient.detach().flatten(), ELEMENTS))
    return sum(parts, start=torch.zeros((), dtype=torch.float64, device=gradient.device))

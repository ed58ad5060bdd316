"""Weights that correct for the difference between the generator's and the trainer's probabilities."""

import torch
from torch import Tensor


def importance_ratio(previous: Tensor, generation: Tensor) -> Tensor:
    """float32 [T]: exp(previous - generation), without a gradient; 0 where that is not finite."""
    return torch.exp(previous - generation).detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def truncate(ratio: Tensor, *, maximum: float) -> Tensor:
    """float32 [T]: min(ratio, maximum), truncated importance sampling (Ionides 2008, "Truncated Importance Sampling")."""
    return ratio.clamp(max=maximum)

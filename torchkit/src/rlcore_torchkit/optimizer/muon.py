"""Muon's update of a matrix, as torch.optim.Muon computes it, of stacks of matrices too.

Shapes: N matrices of A rows and B columns, as the checkpoint has them. The two halves are apart, so that ranks with parts of a
matrix update the running mean of their part, and then orthogonalize the whole.
"""

from math import sqrt

import torch
from torch import Tensor

from rlcore.spi.context import MuonSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic iteration's, as in torch.optim.Muon."""
PRECISION = torch.bfloat16
"""The dtype of the iteration. Its rounding shows where singular values are small, which each iteration triples."""
LEAST_NORM = 1e-7
"""Muon's eps: a matrix with a smaller norm is divided by this."""


def momentum_update(gradient: Tensor, momentum: Tensor, spec: MuonSpec) -> Tensor:
    """float32: what is orthogonalized, of any part of a matrix; `momentum`, of the same shape, is updated in place."""
    momentum.lerp_(gradient, 1 - spec.momentum)
    return gradient.lerp(momentum, spec.momentum) if spec.nesterov else momentum


def orthogonalized(updates: Tensor, spec: MuonSpec) -> Tensor:
    """PRECISION [N, A, B] from whole matrices [N, A, B]: near U Vᵀ of the decomposition U S Vᵀ of each."""
    a, b, c = COEFFICIENTS
    is_tall = updates.shape[-2] > updates.shape[-1]
    current = updates.to(PRECISION)
    current = current.mT if is_tall else current
    current = current / torch.linalg.vector_norm(current, dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(spec.newton_schulz_steps):
        gram = current @ current.mT
        current = torch.baddbmm(current, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), current, beta=a)
    return current.mT if is_tall else current


def update_scale(rows: int, columns: int, spec: MuonSpec) -> float:
    """Factor of the learning rate for matrices of A rows and B columns: MuonSpec.scale."""
    if spec.scale == "original":
        return sqrt(max(1.0, rows / columns))
    return 0.2 * sqrt(max(rows, columns))

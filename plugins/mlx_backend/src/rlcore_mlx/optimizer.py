"""AdamW (arXiv:1711.05101) with torch's order of operations, on weights that are never written to in place."""

from collections.abc import Mapping
from math import sqrt

import mlx.core as mx

from rlcore.spi import OptimizerSpec
from rlcore_mlx.decoder import Weights


class AdamW:
    """The moments of float32 weights."""

    def __init__(self, spec: OptimizerSpec, weights: Weights) -> None:
        self.spec = spec
        self.first = {name: mx.zeros_like(weight) for name, weight in weights.items()}
        self.second = {name: mx.zeros_like(weight) for name, weight in weights.items()}

    def update(self, weights: Weights, gradients: Mapping[str, mx.array], norm: float, rate: float, count: int) -> Weights:
        """The weights after update number `count`, from 1 on, with gradients of this norm before they are scaled down."""
        spec, (beta1, beta2) = self.spec, self.spec.betas
        share = min(1.0, spec.max_grad_norm / (norm + 1e-6)) if spec.max_grad_norm else 1.0
        correction1, correction2 = 1 - beta1**count, sqrt(1 - beta2**count)
        updated = {}
        for name, weight in weights.items():
            gradient = gradients[name] * share
            self.first[name] = first = beta1 * self.first[name] + (1 - beta1) * gradient
            self.second[name] = second = beta2 * self.second[name] + (1 - beta2) * gradient * gradient
            kept = weight * (1 - rate * spec.weight_decay) if weight.ndim > 1 else weight
            updated[name] = kept - (rate / correction1) * first / (mx.sqrt(second) / correction2 + spec.eps)
        mx.eval(updated, self.first, self.second)
        return updated


def global_norm(gradients: Mapping[str, mx.array]) -> float:
    """The L2 norm of all gradients together."""
    return sqrt(float(mx.stack([mx.square(gradient).sum() for gradient in gradients.values()]).sum()))

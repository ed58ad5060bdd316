"""The gradient of one optimizer step, microbatch by microbatch: MLX's chain rule behind the loss's own derivatives."""

import mlx.core as mx
import numpy as np

from rlcore.spi import LossOutput, TokenBatch, TrainStepRequest
from rlcore.spi.arrays import Float32Array
from rlcore_mlx.decoder import Weights, cast
from rlcore_mlx.figures import TokenFigures


class StepGradients:
    """What the microbatches of a step add up to."""

    def __init__(self, request: TrainStepRequest, figures: TokenFigures, dtype: str) -> None:
        self.request, self.figures, self.dtype = request, figures, dtype
        self.gradients: dict[str, mx.array] = {}
        """float32, by Hugging Face name."""
        self.logprobs: list[Float32Array] = []
        """float32 [T] of each microbatch: what its loss got."""
        self.outputs: list[LossOutput] = []

    def add(self, weights: Weights, batch: TokenBatch) -> None:
        """Add a microbatch's gradient with respect to float32 weights, computed in the model's dtype."""
        _, found = mx.value_and_grad(lambda leaves: self.weighted_sum(cast(leaves, self.dtype), batch))(dict(weights))
        before = self.gradients
        self.gradients = {name: before[name] + part if before else part for name, part in found.items()}
        mx.eval(self.gradients)

    def weighted_sum(self, weights: Weights, batch: TokenBatch) -> mx.array:
        """A sum of the figures whose gradient is the loss's. Its factors are the loss's derivatives: they are computed while MLX
        records the forward pass, so that there is one pass, and they are constants to it."""
        from rlcore_torchkit.loss_gradients import loss_gradients  # the one place that needs torch

        loss = self.request.loss
        logprobs, entropy = self.figures.of(weights, batch)
        self.logprobs.append(np.array(logprobs))
        given = None if loss.entropy == "none" else np.array(entropy)
        found = loss_gradients(loss, batch, self.request.counts, logprobs=self.logprobs[-1], entropy=given)
        self.outputs.append(found.output)
        total = (mx.array(found.logprobs) * logprobs).sum()
        return total if found.entropy is None else total + (mx.array(found.entropy) * entropy).sum()

    def totals(self) -> tuple[float, dict[str, float]]:
        """The step's loss and metrics."""
        from rlcore_torchkit.losses import total

        totals = total(self.outputs)
        return float(totals.loss), {name: float(value) for name, value in {**totals.sums, **totals.maxima}.items()}

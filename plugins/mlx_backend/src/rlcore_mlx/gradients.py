"""The gradient of one optimizer step, microbatch by microbatch: MLX's chain rule behind the loss's own derivatives."""

import mlx.core as mx
import numpy as np

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore_mlx.decoder import Decoder, Weights, cast
from rlcore_mlx.figures import token_figures
from rlcore_torchkit.trainer.loss_gradients import LossGradients, loss_gradients


class StepGradients:
    """Sums over the microbatches of a step."""

    def __init__(self, request: spi.TrainStepRequest, decoder: Decoder, dtype: str, max_chunk_logits: int) -> None:
        self.request, self.decoder, self.dtype, self.max_chunk_logits = request, decoder, dtype, max_chunk_logits
        self.gradients: dict[str, mx.array] = {}
        """float32, by Hugging Face name."""
        self.logprobs: list[Float32Array] = []
        """float32 [T] of each microbatch: what its loss got."""
        self.losses: list[LossGradients] = []

    def add(self, weights: Weights, batch: spi.TokenBatch) -> None:
        """Add a microbatch's gradient with respect to float32 weights, computed in the model's dtype."""
        _, found = mx.value_and_grad(lambda leaves: self.weighted_sum(cast(leaves, self.dtype), batch))(dict(weights))
        before = self.gradients
        self.gradients = {name: before[name] + part if before else part for name, part in found.items()}
        mx.eval(self.gradients)

    def weighted_sum(self, weights: Weights, batch: spi.TokenBatch) -> mx.array:
        """A sum of the figures whose gradient is the loss's.

        Its factors, the derivatives of the loss, are constants to MLX: they are computed while it records the forward pass, so
        that one pass is enough.
        """
        loss, counts = self.request.loss, self.request.counts
        logprobs, entropy = token_figures(self.decoder, weights, batch, self.request.temperature, self.max_chunk_logits)
        self.logprobs.append(np.array(logprobs))
        given = None if loss.entropy == "none" else np.array(entropy)
        found = loss_gradients(loss, batch, counts, logprobs=self.logprobs[-1], entropy=given)
        self.losses.append(found)
        total = (mx.array(found.logprobs) * logprobs).sum()
        return total if found.entropy is None else total + (mx.array(found.entropy) * entropy).sum()

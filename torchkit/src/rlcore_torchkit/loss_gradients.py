"""An algorithm's loss for trainers that are not written in torch: numpy arrays in, gradients with respect to them out.

A loss sees the model only through what the trainer computes of each token. So by the chain rule the gradient of the loss with
respect to the weights is that of Σ_t (g_t logprobs_t + h_t entropy_t + k_t values_t), where g, h and k, the derivatives of the
loss, are constants: a sum that any library differentiates.
"""

import torch
from attrs import evolve, frozen
from torch import Tensor

from rlcore.spi.arrays import Float32Array, check_array
from rlcore.spi.batch import GlobalCounts, TokenBatch
from rlcore.spi.loss import LossOutput, LossSpec
from rlcore_torchkit.losses import evaluate
from rlcore_torchkit.microbatch import move


@frozen(kw_only=True, eq=False)
class LossGradients:
    """What the loss says of one microbatch, and its derivatives with respect to what it was given."""

    output: LossOutput
    """Without a gradient: `rlcore_torchkit.losses.total` adds up those of all microbatches."""
    logprobs: Float32Array | None
    """float32 [T]: ∂ loss / ∂ logprobs_t; None where values were given."""
    entropy: Float32Array | None
    """float32 [T]: ∂ loss / ∂ entropy_t; None unless LossSpec.entropy is "loss"."""
    values: Float32Array | None
    """float32 [T]: ∂ loss / ∂ values_t; None unless values were given."""


def loss_gradients(
    loss: LossSpec,
    batch: TokenBatch,
    counts: GlobalCounts,
    *,
    logprobs: Float32Array,
    entropy: Float32Array | None = None,
    values: Float32Array | None = None,
) -> LossGradients:
    """The loss of one microbatch, given the log-probabilities and entropies float32 [T] of its tokens, or zeros and the values
    float32 [T] after them. Nothing that is given is written to.

    Where LossSpec.generation_mismatch asks for them, MISMATCH_METRICS stand beside the loss's own metrics. ContractError where
    a figure is of another shape or dtype, or the loss returns what it must not.
    """
    given = {"logprobs": logprobs, "entropy": entropy, "values": values}
    has_gradient = {"logprobs": values is None, "entropy": loss.entropy == "loss", "values": True}
    tensors = {name: _tensor(name, figures, batch) for name, figures in given.items() if figures is not None}
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items() if has_gradient[name]}
    output = evaluate(
        loss,
        move(batch, torch.device("cpu"), loss.token_columns),
        tensors["logprobs"],
        tensors.get("entropy"),
        counts,
        tensors.get("values"),
    )
    found = torch.autograd.grad(output.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    gradients = {name: gradient.numpy() for name, gradient in zip(leaves, found, strict=True)}
    return LossGradients(
        output=evolve(output, loss=output.loss.detach()),
        logprobs=gradients.get("logprobs"),
        entropy=gradients.get("entropy"),
        values=gradients.get("values"),
    )


def _tensor(name: str, figures: Float32Array, batch: TokenBatch) -> Tensor:
    check_array(name, figures, "float32", batch.num_tokens)
    return torch.tensor(figures)

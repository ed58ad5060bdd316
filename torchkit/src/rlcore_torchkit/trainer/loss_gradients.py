"""An algorithm's loss for trainers that are not written in torch: numpy arrays in, derivatives with respect to them out.

A loss sees the model only through what the trainer computes of each token. So by the chain rule the gradient of the loss with
respect to the weights is that of Σ_t (g_t logprobs_t + h_t entropy_t + k_t values_t), where g, h and k, the derivatives of the
loss, are constants: a sum that any library differentiates.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from rlcore.spi.arrays import Float32Array, check_array
from rlcore.spi.batch import GlobalCounts, TokenBatch
from rlcore.spi.errors import ContractError
from rlcore.spi.loss import LossSpec

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True, eq=False)
class LossGradients:
    """The loss of one microbatch, its metrics, and its derivatives with respect to the arrays that it was given."""

    loss: float
    """The microbatch's part of the step's loss."""
    sums: Mapping[str, float]
    """Metrics that add up over microbatches, MISMATCH_METRICS among them where LossSpec.generation_mismatch asks for them."""
    maxima: Mapping[str, float]
    """Metrics of which the greatest counts."""
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
    """Compute the loss of one microbatch and its derivatives, on the CPU. Nothing that is given is written to.

    Given are the log-probabilities and entropies of its tokens, float32 [T]. With values, float32 [T], log-probabilities are
    zeros. ContractError where a figure is of another shape or dtype, or the loss returns what it must not.
    """
    import torch  # here, since the module's other parts serve where torch is not

    from rlcore_torchkit.trainer.losses import evaluate
    from rlcore_torchkit.trainer.microbatch import move

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
        loss=float(output.loss.detach()),
        sums={name: float(value) for name, value in output.sums.items()},
        maxima={name: float(value) for name, value in output.maxima.items()},
        logprobs=gradients.get("logprobs"),
        entropy=gradients.get("entropy"),
        values=gradients.get("values"),
    )


def total_loss(parts: Sequence[LossGradients]) -> tuple[float, dict[str, float]]:
    """Loss and metrics of an optimizer step of one rank, of its microbatches, of which there is at least one; ContractError
    where they do not report the same metrics."""
    first = parts[0]
    for part in parts:
        if part.sums.keys() != first.sums.keys() or part.maxima.keys() != first.maxima.keys():
            found = f"metrics {sorted({*part.sums, *part.maxima})} after {sorted({*first.sums, *first.maxima})}"
            raise ContractError(f"loss function: found {found}; expected the same from every microbatch")
    sums = {name: sum(part.sums[name] for part in parts) for name in sorted(first.sums)}
    maxima = {name: max(part.maxima[name] for part in parts) for name in sorted(first.maxima)}
    return sum(part.loss for part in parts), {**sums, **maxima}


def _tensor(name: str, figures: Float32Array, batch: TokenBatch) -> "Tensor":
    import torch

    check_array(name, figures, "float32", batch.num_tokens)
    return torch.tensor(figures)

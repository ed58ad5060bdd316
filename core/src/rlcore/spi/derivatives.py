"""An algorithm's loss for trainers that are not written in torch: numpy arrays in, derivatives with respect to them out.

A loss sees the model only through what the trainer computes of each token. So by the chain rule the gradient of the loss with
respect to the weights is that of Σ_t (g_t logprobs_t + h_t entropy_t + k_t values_t), where g, h and k, the derivatives of the
loss, are constants: a sum that any library differentiates.
"""

from collections.abc import Mapping, Sequence
from pkgutil import resolve_name

from attrs import frozen

from rlcore.spi.arrays import Float32Array
from rlcore.spi.batch import GlobalCounts, TokenBatch
from rlcore.spi.errors import ContractError, PluginError
from rlcore.spi.loss import LossSpec

_IN_TORCH = "rlcore_torchkit.trainer.loss_gradients:loss_gradients"
"""What evaluates a loss, which is a function of torch tensors; named, so that the interface imports no torch."""


@frozen(kw_only=True, eq=False)
class LossGradients:
    """What the loss says of one microbatch, and its derivatives with respect to what it was given."""

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
    """The loss of one microbatch, given the log-probabilities and entropies float32 [T] of its tokens, or zeros and the values
    float32 [T] after them. Nothing that is given is written to.

    The first call imports torch, in which losses are written, and the distribution rlcore-torchkit: PluginError where it is not
    installed. ContractError where a figure is of another shape or dtype, or the loss returns what it must not.
    """
    try:
        in_torch = resolve_name(_IN_TORCH)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "rlcore_torchkit":
            raise
        raise PluginError("rlcore-torchkit is not installed, and evaluates losses: pip install rlcore-torchkit") from error
    found: LossGradients = in_torch(loss, batch, counts, logprobs=logprobs, entropy=entropy, values=values)
    return found


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

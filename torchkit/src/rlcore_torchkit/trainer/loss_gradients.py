"""`rlcore.spi.loss_gradients` in torch, on the CPU: derivatives of a loss for trainers in other libraries."""

import torch
from torch import Tensor

from rlcore.spi.arrays import Float32Array, check_array
from rlcore.spi.batch import GlobalCounts, TokenBatch
from rlcore.spi.derivatives import LossGradients
from rlcore.spi.loss import LossSpec
from rlcore_torchkit.trainer.losses import evaluate
from rlcore_torchkit.trainer.microbatch import move


def loss_gradients(
    loss: LossSpec,
    batch: TokenBatch,
    counts: GlobalCounts,
    *,
    logprobs: Float32Array,
    entropy: Float32Array | None = None,
    values: Float32Array | None = None,
) -> LossGradients:
    """Compute the result of `rlcore.spi.loss_gradients`; the arguments are the same."""
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


def _tensor(name: str, figures: Float32Array, batch: TokenBatch) -> Tensor:
    check_array(name, figures, "float32", batch.num_tokens)
    return torch.tensor(figures)

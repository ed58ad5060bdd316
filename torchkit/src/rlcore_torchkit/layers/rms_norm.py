"""RMS normalisation in one kernel, in place of the eight that transformers' modules launch; in few operations on CPU."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def fuse_norms(model: nn.Module) -> None:
    """Let the RMS norms of a transformers model use torch's fused kernel; names and parameters stay as they are."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = FusedRMSNorm


class FusedRMSNorm(nn.Module):
    """weight · x / √(mean x² + ε) over the last dimension, computed in float32 and rounded to x's dtype once."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not _is_float32_on_cpu(hidden_states, self.weight) or torch.compiler.is_compiling():
            return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)
        apply: Any = _RMSNorm.apply
        output: Tensor = apply(hidden_states, self.weight, self.variance_epsilon)
        return output


def rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute FusedRMSNorm's output for rows [..., H] with weight [H]; no gradient goes through it."""
    if not _is_float32_on_cpu(rows, weight):
        return F.rms_norm(rows, weight.shape, weight, epsilon)
    return torch.mul(rows, _scales(rows, epsilon)).mul_(weight)


class _RMSNorm(torch.autograd.Function):
    """RMS norm for CPU, where torch's own takes 1.5 times as long forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scales = _scales(rows, epsilon)
        ctx.save_for_backward(rows, weight, scales)
        return torch.mul(rows, scales).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return (g - n · mean(g · n)) · scales and the sum of gradient · n, for n = rows · scales, g = gradient · weight."""
        rows, weight, scales = ctx.saved_tensors
        normed = rows * scales
        product = gradient * normed
        means = (product @ weight).div_(-rows.shape[-1])[..., None]
        grad_rows = torch.mul(gradient, weight).addcmul_(normed, means).mul_(scales)
        return grad_rows, product.reshape(-1, rows.shape[-1]).sum(0), None


def _is_float32_on_cpu(rows: Tensor, weight: Tensor) -> bool:
    """Return whether torch has no fused kernel for these rows, and the operations here take less time."""
    is_float32 = rows.dtype == weight.dtype == torch.float32
    # Autocast would round the product of the backward pass.
    return is_float32 and rows.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


def _scales(rows: Tensor, epsilon: float) -> Tensor:
    """[..., 1]: 1 / √(mean x² + ε)."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return lengths.square_().div_(rows.shape[-1]).add_(epsilon).rsqrt_()

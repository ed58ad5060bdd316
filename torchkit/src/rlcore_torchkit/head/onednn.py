"""float32 matrix products on CPU by oneDNN, where torch's own BLAS leaves the processor's wider half unused.

torch's x86 wheels send float32 products to MKL, whose AVX-512 kernels run on Intel's processors alone; on others oneDNN, which
the same wheels hold and use for bfloat16, is more than twice as fast.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

CACHED_ROWS = 1024
"""A weight's gradient is summed over so many rows at a time, which is up to a quarter faster than over thousands at once."""
CACHED_OUTPUTS = 512
"""Outputs whose gradient is made and added at a time where rows are few: a whole one would be written and read once more."""
FEWEST_ROWS = 32
"""Calls of it take some 10 µs more, which products of fewer rows do not gain."""
CPU_INFO = Path("/proc/cpuinfo")


@cache
def is_faster() -> bool:
    """Return whether this processor has AVX-512 and is not Intel's, and torch was built with oneDNN."""
    has_operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not has_operator or not CPU_INFO.exists():
        return False
    return "GenuineIntel" not in CPU_INFO.read_text()


def use_onednn(model: nn.Module) -> None:
    """Let the linear layers of `model` use it where it is faster; names, parameters and other dtypes stay as they are."""
    if not is_faster():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear of input [..., K], weight [N, K] and bias [N], of any device and dtype; no gradient goes through it."""
    return _product(input, weight, bias) if _serves(input) else F.linear(input, weight, bias)


def add_linear(residual: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """residual [T, N] + `linear` of input [T, K]; no gradient goes through it."""
    if _serves(input):
        return _product(input, weight, bias).add_(residual)
    added = torch.addmm(residual, input, weight.T)
    return added if bias is None else added + bias


def add_weight_gradient(total: Tensor, grad_rows: Tensor, rows: Tensor) -> None:
    """Add grad_rows [T, N]ᵀ rows [T, K] to `total` [N, K], all of one dtype."""
    if not _serves(rows):
        total.addmm_(grad_rows.T, rows)
    elif len(rows) > CACHED_ROWS:
        total += _weight_gradient(grad_rows, rows)
    else:
        for part, columns in zip(torch.split(total, CACHED_OUTPUTS), torch.split(grad_rows, CACHED_OUTPUTS, 1), strict=True):
            part += _product(columns.T, rows.T)


class OneDnnLinear(nn.Linear):
    """nn.Linear that computes in oneDNN where its input is float32 on CPU."""

    def forward(self, input: Tensor) -> Tensor:
        if not _can_serve(input):
            return F.linear(input, self.weight, self.bias)
        apply: Any = _Linear.apply
        # As one matrix: torch lets nobody change what a function returns in place where that is a view, as of more dimensions.
        output: Tensor = apply(input.reshape(-1, input.shape[-1]), self.weight, self.bias)
        return output.view(*input.shape[:-1], -1)


def _serves(input: Tensor) -> bool:
    """Return whether its product takes less time than torch's own."""
    return _can_serve(input) and is_faster() and input.numel() >= FEWEST_ROWS * input.shape[-1]


def _can_serve(input: Tensor) -> bool:
    is_plain = input.device.type == "cpu" and input.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    return is_plain and input.numel() > 0  # it has no kernel for nothing


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return _product(rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad_input = _product(grad_output, weight.T) if needs_input else None
        grad_weight = _weight_gradient(grad_output, rows) if needs_weight else None
        return grad_input, grad_weight, grad_output.sum(0) if needs_bias else None


def _weight_gradient(grad_rows: Tensor, rows: Tensor) -> Tensor:
    """grad_rows [T, N]ᵀ rows [T, K], with the wider side in the columns, which oneDNN's kernels like best."""
    if grad_rows.shape[1] > rows.shape[1]:
        return _weight_gradient(rows, grad_rows).T
    parts = zip(torch.split(grad_rows, CACHED_ROWS), torch.split(rows, CACHED_ROWS), strict=True)
    gradient = _product(*(part.T for part in next(parts)))
    for grad_part, part in parts:
        gradient += _product(grad_part.T, part.T)
    return gradient


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """input [..., K] weight [N, K]ᵀ + bias [N], without a gradient."""
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        weight = weight.contiguous()  # for parts of wider rows oneDNN has no kernel but one a thousand times slower
    output: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return output

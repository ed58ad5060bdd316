"""Functions of a Qwen3's layers by `invariant_kernels`, with gradients of the same functions by torch.

Shapes: T tokens, H heads, D head dimension, K and N sides of a matrix.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

from torch import Tensor, enable_grad
from torch.autograd import Function, grad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rlcore_torchkit.layers import invariant_kernels as kernels
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import Scores, causal_attention


class RotaryTable:
    """The angles of all positions that a model has, which its layers share."""

    def __init__(self, config: Any) -> None:
        """`config` is a Qwen3's, of transformers."""
        self._head_dim, self._base = config.head_dim, config.rope_parameters["rope_theta"]
        self._num_positions = config.max_position_embeddings
        self._table: Tensor | None = None

    def like(self, states: Tensor) -> Tensor:
        """[positions, D] in the dtype of `states` and on their device."""
        if self._table is None or self._table.device != states.device or self._table.dtype != states.dtype:
            self._table = kernels.rotary_table(self._head_dim, self._base, self._num_positions, states.dtype, states.device)
        return self._table


def linear(states: Tensor, weight: Tensor, parts: int = 1) -> Tensor:
    """[..., N] from states [..., K] and weight [N, K]: a sum of `parts` products of K / parts columns each, in their order and
    rounded at each sum, as so many tensor ranks add theirs."""
    apply: Any = _Linear.apply
    output: Tensor = apply(states.flatten(0, -2), weight, parts)
    return output.view(*states.shape[:-1], len(weight))


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight · x / √(mean x² + ε) over the last dimension."""
    normed: Tensor = _computed(partial(kernels.rms_norm, epsilon=epsilon), partial(_norm, epsilon=epsilon), states, weight)
    return normed


def silu_and_multiply(gate_and_up: Tensor) -> Tensor:
    """silu(gate) · up, [..., I], from the two beside each other, [..., 2 I]."""
    product: Tensor = _computed(kernels.silu_and_multiply, kernels.multiplied_by_torch, gate_and_up)
    return product


def rotated_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, table: RotaryTable, scaling: float
) -> Tensor:
    """[T, H, D]: attention of every sequence to itself, from normed query and key and value [T, heads, D]; turns the first two
    by their positions."""
    places = {"positions": packed.position_ids[0], "table": table.like(query)}
    query, key = _computed(partial(kernels.rotate, **places), partial(kernels.rotated_by_torch, **places), query, key)
    by_kernels = partial(kernels.attention, packed=packed, scaling=scaling)
    by_torch = partial(causal_attention, packed=packed, scores=Scores(scaling=scaling))
    output: Tensor = _computed(by_kernels, by_torch, query, key, value)
    return output


class _Linear(Function):
    """[T, N] from states [T, K] and weight [N, K], with the gradient of one product."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(states, weight)
        # Contiguous, since the kernel chooses the width of its offsets by the number of elements.
        chunks = ([part.contiguous() for part in matrix.chunk(parts, dim=-1)] for matrix in (states, weight))
        return reduce(add, map(kernels.linear, *chunks))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states, weight = ctx.saved_tensors
        needs_states, needs_weight, _ = ctx.needs_input_grad
        return gradient @ weight if needs_states else None, gradient.T @ states if needs_weight else None, None


class _Computed(Function):
    """Computes `kernel` of the inputs, with the gradient of `formula`, which is computed again for it."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], formula: Callable[..., Any], *inputs: Tensor) -> Any:
        ctx.formula = formula
        ctx.save_for_backward(*inputs)
        return kernel(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [saved.detach().requires_grad_(needs) for saved, needs in zip(ctx.saved_tensors, needed, strict=True)]
        with enable_grad():
            outputs = ctx.formula(*inputs)
        found = iter(grad(outputs, [one for one in inputs if one.requires_grad], gradients))
        return None, None, *(next(found) if needs else None for needs in needed)


def _computed(kernel: Callable[..., Any], formula: Callable[..., Any], *inputs: Tensor) -> Any:
    apply: Any = _Computed.apply
    return apply(kernel, formula, *inputs)


def _norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(states, weight.shape, weight, epsilon)

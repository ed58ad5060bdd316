"""A Qwen3 whose layers compute by the kernels of a batch-invariant engine, with gradients of the same functions by torch.

Modules keep their names, parameters and places; only what they compute with changes. The log-probabilities of a token are then
the bits that the engine recorded, since nothing that it or the trainer computes beside a token touches them.

Shapes: T tokens, H heads, D head dimension, K and N sides of a matrix.
"""

from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from rlcore_fsdp2 import invariant_kernels as kernels
from rlcore_torchkit.architectures.decoders import layers_of
from rlcore_torchkit.head.logprobs import HeadLogprobs, own_head
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import Scores, causal_attention


def use_invariant_kernels(model: Any, *, parts: int = 1) -> None:
    """Let the layers and the last norm of a Qwen3 compute by `invariant_kernels`, as engines of `parts` ranks do."""
    table = RotaryTable(model.config)
    for layer in layers_of(model):
        layer.self_attn.__class__, layer.mlp.__class__ = InvariantAttention, InvariantMlp
        layer.self_attn.rotary_table = table
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__ = InvariantLinear
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.__class__, module.parts = SummedLinear, parts
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            module.__class__ = InvariantNorm


def invariant_head(model: Any) -> HeadLogprobs:
    """Log-probabilities by logits in float32, divided and normalised as the engine's are."""
    return own_head(model, scaled=kernels.scaled_logits)


class RotaryTable:
    """The angles of all positions that a model has, which its layers share."""

    def __init__(self, config: Any) -> None:
        self._head_dim, self._base = config.head_dim, config.rope_parameters["rope_theta"]
        self._num_positions = config.max_position_embeddings
        self._table: Tensor | None = None

    def like(self, states: Tensor) -> Tensor:
        """[positions, D] in the dtype of `states` and on their device."""
        if self._table is None or self._table.device != states.device or self._table.dtype != states.dtype:
            self._table = kernels.rotary_table(self._head_dim, self._base, self._num_positions, states.dtype, states.device)
        return self._table


class InvariantLinear(nn.Linear):
    """nn.Linear without a bias."""

    def forward(self, input: Tensor) -> Tensor:
        apply: Any = _Linear.apply
        output: Tensor = apply(input.flatten(0, -2), self.weight)
        return output.unflatten(0, input.shape[:-1])


class SummedLinear(InvariantLinear):
    """A product that tensor ranks compute by parts of its columns, and add in the order of ranks."""

    parts: int

    def forward(self, input: Tensor) -> Tensor:
        apply: Any = _Linear.apply
        states, weights = (matrix.chunk(self.parts, dim=-1) for matrix in (input.flatten(0, -2), self.weight))
        output: Tensor = reduce(add, map(apply, states, weights))  # rounded to the dtype at each sum
        return output.unflatten(0, input.shape[:-1])


class InvariantNorm(nn.Module):
    """weight · x / √(mean x² + ε) over the last dimension."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        formula = partial(_norm_by_torch, epsilon=self.variance_epsilon)
        kernel = partial(kernels.rms_norm, epsilon=self.variance_epsilon)
        normed: Tensor = _computed(kernel, formula, hidden_states, self.weight)
        return normed


class InvariantMlp(nn.Module):
    """down(silu(gate(x)) · up(x))"""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate_and_up = torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)
        product: Tensor = self.down_proj(_computed(kernels.silu_and_multiply, kernels.multiplied_by_torch, gate_and_up))
        return product


class InvariantAttention(nn.Module):
    """Attention of packed sequences, with normed queries and keys."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    head_dim: int
    scaling: float
    rotary_table: RotaryTable

    def forward(self, hidden_states: Tensor, *, packed: PackedSequences, **_: Any) -> tuple[Tensor, None]:
        states = hidden_states.squeeze(0)
        query, key, value = (
            projection(states).unflatten(-1, (-1, self.head_dim)) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = self.q_norm(query), self.k_norm(key)
        places = {"positions": packed.position_ids[0], "table": self.rotary_table.like(query)}
        query, key = _computed(partial(kernels.rotate, **places), partial(kernels.rotated_by_torch, **places), query, key)
        by_kernels = partial(kernels.attention, packed=packed, scaling=self.scaling)
        by_torch = partial(causal_attention, packed=packed, scores=Scores(scaling=self.scaling))
        output: Tensor = _computed(by_kernels, by_torch, query, key, value)
        return self.o_proj(output.flatten(1))[None], None


class _Linear(torch.autograd.Function):
    """[T, N] from states [T, K] and weight [N, K]."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight)
        return kernels.linear(states, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        states, weight = ctx.saved_tensors
        needs_states, needs_weight = ctx.needs_input_grad
        return gradient @ weight if needs_states else None, gradient.T @ states if needs_weight else None


class _Computed(torch.autograd.Function):
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
        with torch.enable_grad():
            outputs = ctx.formula(*inputs)
        found = iter(torch.autograd.grad(outputs, [one for one in inputs if one.requires_grad], gradients))
        return None, None, *(next(found) if needs else None for needs in needed)


def _computed(kernel: Callable[..., Any], formula: Callable[..., Any], *inputs: Tensor) -> Any:
    apply: Any = _Computed.apply
    return apply(kernel, formula, *inputs)


def _norm_by_torch(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(states, weight.shape, weight, epsilon)

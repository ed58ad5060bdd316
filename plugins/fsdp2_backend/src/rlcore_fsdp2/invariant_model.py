"""A Qwen3 whose layers compute by the kernels of a batch-invariant engine.

Modules keep their names, parameters and places; only what they compute with changes. The log-probabilities of a token are then
the bits that the engine recorded, since nothing that it or the trainer computes beside a token touches them.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rlcore_torchkit.architectures.decoders import layers_of
from rlcore_torchkit.head.float32_logits import scaled_logits
from rlcore_torchkit.head.logprobs import HeadLogprobs, own_head
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.invariant_layers import RotaryTable, linear, rms_norm, rotated_attention, silu_and_multiply


def use_invariant_kernels(model: Any, *, parts: int = 1) -> None:
    """Let the layers and the last norm of a Qwen3 compute by `invariant_kernels`, as engines of `parts` ranks do."""
    table = RotaryTable(model.config)
    for layer in layers_of(model):
        layer.self_attn.__class__, layer.mlp.__class__ = InvariantAttention, InvariantMlp
        layer.self_attn.rotary_table = table
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.__class__, module.parts = InvariantLinear, 1
        for module in (layer.self_attn.o_proj, layer.mlp.down_proj):
            module.parts = parts
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            module.__class__ = InvariantNorm


def invariant_head(model: Any) -> HeadLogprobs:
    """Log-probabilities by logits in float32, divided and normalised as the engine's are."""
    return own_head(model, scaled=scaled_logits)


class InvariantLinear(nn.Linear):
    """nn.Linear without a bias."""

    parts: int
    """The products that it adds, each of its own columns: tensor ranks of an engine compute one each."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.parts)


class InvariantNorm(nn.Module):
    """weight · x / √(mean x² + ε) over the last dimension."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class InvariantMlp(nn.Module):
    """down(silu(gate(x)) · up(x))"""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.down_proj(silu_and_multiply(torch.cat([self.gate_proj(x), self.up_proj(x)], dim=-1)))
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
        output = rotated_attention(query, key, value, packed, self.rotary_table, self.scaling)
        return self.o_proj(output.flatten(1))[None], None

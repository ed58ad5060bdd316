"""Gated delta nets (arXiv:2412.06464) over packed sequences, in the place of a layer's attention.

Megatron's own forward pass takes contiguous chunks of each sequence for each context rank. Here context ranks share the
microbatch as they do for attention: each computes all tokens of its heads. Shapes: S tokens of a rank, T of the microbatch,
K heads of keys and V of values of a rank, D and E their widths.
"""

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    chunk_gated_delta_rule,
    torch_chunk_gated_delta_rule,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional as F

from rlcore_megatron.modules.packing import PackedBatch
from rlcore_megatron.modules.rms_norm import PlainRMSNorm
from rlcore_torchkit.forward.context_parallel import ContextPart
from rlcore_torchkit.layers.attention import PackedSequences

NORM_EPSILON = 1e-6
"""The ε of the lengths that queries and keys are divided by."""


class HeadNorm(PlainRMSNorm):
    """The norm of each head's output. Tensor ranks have heads of their own: its gradient is the sum over all of them."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(config, hidden_size, eps, **options)
        self.weight.sequence_parallel = False  # type: ignore[attr-defined]

    def forward(self, states: Tensor) -> Tensor:
        """weight · x / √(mean x² + ε), in the dtype of the states [..., E]."""
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        normed = F.rms_norm(wide, wide.shape[-1:], None, self.eps).type_as(states)
        scaled: Tensor = copy_to_tensor_model_parallel_region(self.weight) * normed
        return scaled


class DeltaNet(GatedDeltaNet):  # type: ignore[misc]
    """Megatron's layer with a forward pass over packed sequences and context ranks."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        # Megatron demands kernels that this forward pass asks for where there is a GPU alone.
        with mock.patch.object(sys.modules[GatedDeltaNet.__init__.__module__], "HAVE_FLA", True):
            super().__init__(config, submodules, layer_number, pg_collection=groups)

    def _setup_variant_attrs(self) -> None:  # of Megatron-Core from 0.18 on
        super()._setup_variant_attrs()
        self.gated_delta_rule = torch_chunk_gated_delta_rule

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002 - the arguments are Megatron's, by these names
        packed_seq_params: PackedBatch | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """[S, 1, H] from [S, 1, H] of this rank's tokens, and no bias."""
        assert packed_seq_params is not None
        part = packed_seq_params.part
        assert part is not None
        projected, _bias = self.in_proj(hidden_states)
        keys, values, heads = (size // self.tp_size for size in (self.qk_dim, self.v_dim, self.num_value_heads))
        sections = projected.squeeze(1).split([keys, keys, values, values, heads, heads], -1)
        query, key, value, gate, beta, alpha = _of_own_heads(sections, part)
        weights = self.conv1d.weight.squeeze(1).split([keys, keys, values])
        weight = torch.cat([part.own_heads(section) for section in weights])
        mixed = F.silu(convolved(torch.cat([query, key, value], -1), weight, part.packed))
        query, key, value = mixed.split([query.shape[-1], key.shape[-1], value.shape[-1]], -1)
        rate, bias = part.own_heads(self.A_log).float().exp(), part.own_heads(self.dt_bias)
        output = delta_rule(
            _normed(query.unflatten(-1, (-1, self.key_head_dim))),
            _normed(key.unflatten(-1, (-1, self.key_head_dim))),
            value.unflatten(-1, (-1, self.value_head_dim)),
            -rate * F.softplus(alpha.float() + bias),
            beta.sigmoid(),
            part.packed,
        )
        gates = F.silu(gate.float()).unflatten(-1, (-1, self.value_head_dim))
        gated = (self.out_norm(output) * gates).to(output.dtype)
        is_shared = part.num_ranks > 1
        gated = part.to_tokens(gated) if is_shared else F.pad(gated, (0, 0, 0, 0, 0, part.num_padding))
        result: tuple[Tensor, Tensor | None] = self.out_proj(gated.flatten(1)[:, None])
        return result


def _of_own_heads(sections: tuple[Tensor, ...], part: ContextPart) -> list[Tensor]:
    """[T, width / ranks] of all tokens and this context rank's heads, from each of sections [S, width] of its tokens."""
    num_ranks = part.num_ranks
    if num_ranks == 1:
        return [section[: part.packed.num_tokens] for section in sections]
    shared = torch.cat([section.unflatten(-1, (num_ranks, -1)) for section in sections], -1)
    return list(part.to_heads(shared).split([section.shape[-1] // num_ranks for section in sections], -1))


def _normed(states: Tensor) -> Tensor:
    """States [T, K, D] of length one."""
    wide = states.float()
    normed: Tensor = (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPSILON).rsqrt()).type_as(states)
    return normed


def convolved(states: Tensor, weight: Tensor, packed: PackedSequences) -> Tensor:
    """[T, C], each channel's sum over a token and those before it in its sequence, from [T, C] and weight [C, kernel]."""
    positions = packed.position_ids[0][:, None]
    result = states * weight[:, -1]
    for back in range(1, weight.shape[1]):
        before = F.pad(states, (0, 0, back, 0))[: len(states)]
        result = result + before.where(positions >= back, 0) * weight[:, -1 - back]
    return result


def delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, packed: PackedSequences) -> Tensor:
    """[T, V, E] from query and key [T, K, D], value [T, V, E], and the logarithms of decays and rates [T, V].

    On a GPU by flash-linear-attention's kernels, on a CPU sequence by sequence.
    """
    shared = value.shape[1] // key.shape[1]
    states = [query.repeat_interleave(shared, 1), key.repeat_interleave(shared, 1), value]
    if query.is_cuda:
        rows = [state[None].contiguous() for state in (*states, decay, beta)]
        output: Tensor = chunk_gated_delta_rule(*rows, cu_seqlens=packed.cu_seqlens.long())[0][0]
        return output
    bounds = packed.offsets.tolist()
    parts = [
        torch_chunk_gated_delta_rule(*(state[None, begin:end] for state in (*states, decay, beta)))[0][0]
        for begin, end in pairwise(bounds)
        if begin < end
    ]
    return torch.cat(parts)


def in_place_of_attention(layer: ModuleSpec, has_delta: bool) -> ModuleSpec:
    """The layer's specification, if it `has_delta` with a delta net of the linear layers of its attention; Megatron has one
    object for all layers."""
    if not has_delta:
        return layer
    linear = layer.submodules.self_attention.submodules
    parts = GatedDeltaNetSubmodules(in_proj=linear.linear_qkv, out_norm=HeadNorm, out_proj=linear.linear_proj)
    attention = ModuleSpec(module=DeltaNet, submodules=parts)
    return replace(layer, submodules=replace(layer.submodules, self_attention=attention))

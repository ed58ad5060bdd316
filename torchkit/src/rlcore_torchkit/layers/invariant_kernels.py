"""The kernels of a decoder's layers that vLLM has in its batch-invariant mode, and on CPU the same functions by torch.

Each row that they return is the same bits whatever rows are computed beside it. None has a gradient.

Shapes: T tokens, H heads, D head dimension, K and N sides of a matrix, I columns of the MLP.
"""

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import Scores, causal_attention

FLASH_ATTENTION = 3
"""The version of vLLM's flash attention that its engines choose on Hopper."""


def linear(states: Tensor, weight: Tensor) -> Tensor:
    """[T, N] from states [T, K] and weight [N, K]."""
    if not states.is_cuda:
        return F.linear(states, weight)
    output: Tensor = _kernels().linear_batch_invariant(states, weight)
    return output


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight · x / √(mean x² + ε) over the last dimension."""
    if not states.is_cuda:
        return F.rms_norm(states, weight.shape, weight, epsilon)
    output: Tensor = _kernels().rms_norm_batch_invariant(states, weight, epsilon)
    return output


def rotate(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key [T, heads, D], turned by `table` [positions, D], cosines before sines, at `positions` int64 [T]."""
    if not query.is_cuda:
        return rotated_by_torch(query, key, positions, table)
    query, key = query.clone(), key.clone()  # the kernel overwrites them
    _operations().rotary_embedding(positions, query, key, query.shape[-1], table, True)
    return query, key


def rotated_by_torch(query: Tensor, key: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate`, with a gradient."""
    cosines, sines = table[positions][:, None].chunk(2, dim=-1)

    def turned(states: Tensor) -> Tensor:
        first, second = states.chunk(2, dim=-1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)

    return turned(query), turned(key)


def silu_and_multiply(gate_and_up: Tensor) -> Tensor:
    """silu(gate) · up, [T, I], from the two beside each other, [T, 2 I]."""
    if not gate_and_up.is_cuda:
        return multiplied_by_torch(gate_and_up)
    width = gate_and_up.shape[-1] // 2
    output = gate_and_up.new_empty(*gate_and_up.shape[:-1], width)
    _operations()
    torch.ops._C.silu_and_mul(output, gate_and_up)
    return output


def multiplied_by_torch(gate_and_up: Tensor) -> Tensor:
    """`silu_and_multiply`, with a gradient."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scaling: float) -> Tensor:
    """[T, H, D]: causal attention of every sequence to itself, from query, key and value [T, heads, D]."""
    if not query.is_cuda:
        return causal_attention(query, key, value, packed, Scores(scaling=scaling))
    bounds, length = packed.cu_seqlens, packed.max_length
    output: Tensor = _flash_attention().flash_attn_varlen_func(
        query,
        key,
        value,
        max_seqlen_q=length,
        cu_seqlens_q=bounds,
        max_seqlen_k=length,
        cu_seqlens_k=bounds,
        softmax_scale=scaling,
        causal=True,
        num_splits=1,
        fa_version=FLASH_ATTENTION,
    )
    return output


def rotary_table(head_dim: int, base: float, num_positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[num_positions, D]: cosines, then sines, computed on the device that they are for, as vLLM does."""
    frequencies = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float, device=device) / head_dim))
    angles = torch.arange(num_positions, dtype=torch.float, device=device)[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)


@cache
def _kernels() -> ModuleType:
    return import_module("vllm.model_executor.layers.batch_invariant")


@cache
def _operations() -> Any:
    """vLLM's own operations; importing them also registers those that have no function in Python."""
    return import_module("vllm._custom_ops")


@cache
def _flash_attention() -> Any:
    return import_module("vllm.vllm_flash_attn")

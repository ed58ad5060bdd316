"""Attention over packed sequences, registered with transformers: no padding, and no [T, T] mask.

Beginnings that sequences have in common, as samples have their prompt, are computed once: what a causal model makes of a token
depends on that token and those before it alone.

Shapes: T tokens of the packed microbatch, N sequences, R rows that the model computes for them, H heads, D head dimension.
"""

import inspect
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as F

from rlcore.spi.arrays import Int64Array, check_offsets
from rlcore.spi.errors import ContractError
from rlcore_torchkit.transformers_import import import_transformers

PACKED_ATTENTION = "rlcore_packed"
"""The name under which transformers knows it: `from_pretrained(..., attn_implementation=PACKED_ATTENTION)`."""

FLASH_DTYPES = (torch.float16, torch.bfloat16)
_BUCKET_SLACK_TOKENS = 16
_BUCKET_SLACK_SHARE = 0.25


@frozen(kw_only=True, eq=False)
class SequenceBucket:
    """Sequences of similar length, which one batched attention call handles."""

    num_sequences: int
    length: int
    """Tokens of its longest sequence, to which the others are padded on the right."""
    gather: Tensor
    """int64 [num_sequences * length]: the packed token at each place; a sequence's last token is repeated as padding."""


@frozen(kw_only=True, eq=False)
class AttentionPlan:
    """The batched calls that per-sequence attention is cut into."""

    buckets: tuple[SequenceBucket, ...]
    restore: Tensor
    """int64 [T]: where each packed token is in the concatenation of the buckets' places."""


@frozen(kw_only=True, eq=False)
class PackedSequences:
    """Bounds of the sequences of one packed microbatch; made once a microbatch and used by every layer."""

    offsets: Int64Array
    """int64 [N+1], on the host: sequence n is the tokens offsets[n] to offsets[n+1]."""
    device: torch.device
    cu_seqlens: Tensor
    """int32 [N+1]: the same offsets, on the device."""
    position_ids: Tensor
    """int64 [1, T], on the device: from 0 in every sequence."""
    max_length: int
    """Tokens of the longest sequence."""

    @classmethod
    def from_offsets(cls, offsets: "Int64Array | Tensor", device: torch.device | str) -> "PackedSequences":
        """The bounds of sequences by their offsets, int64 [N+1] on the host, from 0 to T; ContractError where one is empty."""
        host = offsets.cpu().numpy() if isinstance(offsets, Tensor) else offsets
        check_offsets("offsets", host, int(host[-1]) if len(host) else 0, allow_empty=False)
        if len(host) < 2:
            raise ContractError("offsets: found no sequence; expected at least one")
        lengths = np.diff(host)
        positions = np.arange(host[-1], dtype=np.int64) - np.repeat(host[:-1], lengths)
        return cls(
            offsets=host,
            device=torch.device(device),
            cu_seqlens=torch.from_numpy(host.astype(np.int32)).to(device),
            position_ids=torch.from_numpy(positions).to(device)[None],
            max_length=int(lengths.max()),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def predicting(self) -> Tensor:
        """int64 [T - N], on the device: the positions whose next token belongs to the same sequence."""
        predicts = np.ones(self.num_tokens, np.bool_)
        predicts[self.offsets[1:] - 1] = False
        return torch.from_numpy(np.flatnonzero(predicts)).to(self.device)

    @cached_property
    def plan(self) -> AttentionPlan | None:
        """Buckets of similar length for batched attention; None where all sequences are equally long already."""
        return attention_plan(self.offsets, self.device)


def attention_plan(offsets: Int64Array, device: torch.device) -> AttentionPlan | None:
    """Buckets for the sequences with these offsets, int64 [N+1]; None where all are equally long."""
    lengths = np.diff(offsets)
    if lengths.min() == lengths.max():
        return None
    restore = np.empty(int(offsets[-1]), np.int64)
    buckets, num_places = [], 0
    for members in _similar_lengths(lengths):
        longest = int(lengths[members[0]])
        within, own = np.arange(longest), lengths[members, None]
        gather = (offsets[members, None] + np.minimum(within, own - 1)).reshape(-1)
        real = np.flatnonzero(within < own)
        restore[gather[real]] = num_places + real
        num_places += len(gather)
        buckets.append(SequenceBucket(num_sequences=len(members), length=longest, gather=torch.from_numpy(gather).to(device)))
    return AttentionPlan(buckets=tuple(buckets), restore=torch.from_numpy(restore).to(device))


@frozen(kw_only=True, eq=False)
class SharedSequences(PackedSequences):
    """Packed sequences of which the model computes R rows in place of T tokens, on CPU."""

    first: Tensor
    """int64 [R]: a packed token of each row."""
    rows: Tensor
    """int64 [T]: the row of each packed token."""

    @classmethod
    def of(cls, packed: PackedSequences, first: Tensor, rows: Tensor) -> "SharedSequences":
        """`packed` by such rows."""
        return cls(
            offsets=packed.offsets,
            device=packed.device,
            cu_seqlens=packed.cu_seqlens,
            position_ids=packed.position_ids.index_select(1, first),
            max_length=packed.max_length,
            first=first,
            rows=rows,
        )

    @property
    def num_tokens(self) -> int:
        """R: what a model is given."""
        return len(self.first)

    @cached_property
    def plan(self) -> AttentionPlan:
        """Each sequence reads the rows of its tokens; of tokens that share one, which attend alike, one is kept."""
        plan = attention_plan(self.offsets, self.device)
        if plan is None:
            whole = SequenceBucket(num_sequences=self.num_sequences, length=self.max_length, gather=self.rows)
            return AttentionPlan(buckets=(whole,), restore=self.first)
        buckets = (
            SequenceBucket(num_sequences=bucket.num_sequences, length=bucket.length, gather=self.rows[bucket.gather])
            for bucket in plan.buckets
        )
        return AttentionPlan(buckets=tuple(buckets), restore=plan.restore[self.first])


def _similar_lengths(lengths: Int64Array) -> list[Int64Array]:
    """Groups of sequence indices, longest first, in which padding to the longest costs little."""
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    while start < len(order):
        longest = int(lengths[order[start]])
        shortest = min(longest * (1 - _BUCKET_SLACK_SHARE), longest - _BUCKET_SLACK_TOKENS)
        end = int(np.searchsorted(-lengths[order], -shortest, side="right"))
        groups.append(order[start:end])
        start = end
    return groups


def register_packed_attention() -> str:
    """Make packed attention known to transformers, once or more often; returns PACKED_ATTENTION.

    No mask function is registered on purpose: transformers then builds no mask, and reads nothing back from the device.
    """
    import_transformers()
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedSequences | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every sequence to itself, in the form that transformers' models call.

    query [1, H, T, D], key [1, H of keys, T, D], value [1, H of keys, T, V]; returns [1, T, H, V]. On CUDA in half precision by
    torch's variable-length flash attention, elsewhere by scaled_dot_product_attention over buckets of similar length.
    """
    if packed is None:
        raise ContractError("packed attention: found no `packed` argument; expected a call through packed_forward")
    _check_supported(module, query, packed, attention_mask, dropout, sliding_window, softcap)
    dtype = torch.get_autocast_dtype(query.device.type) if torch.is_autocast_enabled(query.device.type) else value.dtype
    query, key, value = (states.squeeze(0).transpose(0, 1).to(dtype) for states in (query, key, value))
    return causal_attention(query, key, value, packed, scaling)[None], None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scaling: float | None) -> Tensor:
    """[T, H, V] of every sequence to itself, from query, key [T, heads, D] and value [T, heads, V] of one dtype."""
    attend = _flash_attention if query.is_cuda and query.dtype in FLASH_DTYPES else _bucketed_attention
    return attend(query, key, value, packed, scaling)


def _check_supported(
    module: nn.Module,
    query: Tensor,
    packed: PackedSequences,
    attention_mask: Tensor | None,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    if query.shape[0] != 1 or query.shape[2] != packed.num_tokens:
        found = f"batch {query.shape[0]} of {query.shape[2]} tokens"
        raise ContractError(f"packed attention: found {found}; expected batch 1 of {packed.num_tokens} tokens")
    extras = {"an attention mask": attention_mask is not None, "attention dropout": dropout > 0.0 and module.training}
    extras |= {"a sliding window": sliding_window is not None, "soft-capped logits": softcap is not None}
    for extra, present in extras.items():
        if present:
            raise ContractError(f"packed attention: found {extra}; expected plain causal attention. Use another model")


@cache
def flash_options() -> dict[str, Any]:
    """torch 2.12 added `enable_gqa`; before it, fewer key heads than query heads needed no option."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    return options | {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else options


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scaling: float | None) -> Tensor:
    """[T, H, V] from query, key [T, heads, D] and value [T, heads, V] in half precision on CUDA."""
    from torch.nn.attention.varlen import varlen_attn

    bounds, length, width = packed.cu_seqlens, packed.max_length, value.shape[-1]
    if width < query.shape[-1]:  # the kernel knows one width alone
        value = F.pad(value, (0, query.shape[-1] - width))
    output = varlen_attn(query, key, value, bounds, bounds, length, length, scale=scaling, **flash_options())
    assert isinstance(output, Tensor)
    return output[..., :width]


def _bucketed_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scaling: float | None) -> Tensor:
    """[T, H, V]: sequences padded on the right need no mask, since no earlier query sees a later key."""
    plan = packed.plan
    if plan is None:
        return _causal(query, key, value, packed.num_sequences, scaling)
    outputs = []
    for bucket in plan.buckets:
        queries, keys, values = (states.index_select(0, bucket.gather) for states in (query, key, value))
        outputs.append(_causal(queries, keys, values, bucket.num_sequences, scaling))
    return torch.cat(outputs).index_select(0, plan.restore)


def _causal(query: Tensor, key: Tensor, value: Tensor, num_sequences: int, scaling: float | None) -> Tensor:
    """[places, H, V] from [places, heads, D or V], where the places are equally long sequences, one after another."""
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and groups > 1:
        # CUDA's float32 kernels have no grouped heads: without this torch would take the one that stores all scores.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query, key, value = (states.view(num_sequences, -1, *states.shape[1:]).transpose(1, 2) for states in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).flatten(0, 1)

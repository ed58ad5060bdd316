"""Attention over packed sequences for any decoder of transformers, with windows, sinks and soft caps where layers have some:
no padding, and no [T, T] mask.

Shapes: T tokens of the packed microbatch, H query heads, K key heads, D head dimension, E of values, S sequences of a bucket of
length L.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn
from torch.nn import functional as F

from rlcore.spi.errors import ContractError
from rlcore_torchkit.architectures.decoders import is_image_model
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.transformers_import import import_transformers

PACKED_ATTENTION = "rlcore_packed"
"""The name under which transformers knows it: `from_pretrained(..., attn_implementation=PACKED_ATTENTION)`."""
FLASH_DTYPES = (torch.float16, torch.bfloat16)
MAX_FLASH_DIM = 256
"""The largest head dimension of torch's variable-length flash attention."""


@define
class WindowCount:
    """Counts the layers that are called with a window."""

    count: int = 0


_counted = WindowCount()


@contextmanager
def count_windows() -> Iterator[WindowCount]:
    """Count the layers that are called with a window from now on."""
    _counted.count = 0
    yield _counted


def register_packed_attention() -> str:
    """Make packed attention known to transformers, once or more often; returns PACKED_ATTENTION.

    No mask function is registered on purpose: transformers then builds no mask, and reads nothing back from the device.
    """
    import_transformers()
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


def attention_of(config: Any, name: str) -> str | dict[str, str]:
    """Return the option that gives a language model's layers the attention `name`. A vision tower, which attends to all of an
    image, computes by torch's own."""
    return {"": name, "text_config": name, "vision_config": "sdpa"} if is_image_model(config.to_dict()) else name


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
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of every sequence to itself, in the form that transformers' models call.

    query [1, H, T, D], key [1, K, T, D] and value [1, K, T, E]; returns [1, T, H, E]. Where the T tokens come as several rows
    of equal length, they are packed in the order of the rows. A query sees itself and the `sliding_window` - 1 tokens before
    it; scores are softcap · tanh(score / softcap); `s_aux` [H] are scores of a sink whose value is zero. ContractError for what
    it does not compute: masks, dropout, attention to later tokens.
    """
    if packed is None:
        raise ContractError("attention: found no `packed` argument; expected a model that hands keyword arguments on to it")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    extras = {"an attention mask": attention_mask is not None, "attention dropout": dropout > 0.0 and module.training}
    found = [extra for extra, present in (extras | {"attention to later tokens": not is_causal}).items() if present]
    if found:
        raise ContractError(f"attention: found {' and '.join(found)}; expected causal attention alone")
    num_rows, length = query.shape[0], query.shape[2]
    if num_rows * length != packed.num_tokens or key.shape[2] != length:
        shapes = f"queries {list(query.shape)} and keys {list(key.shape)}"
        raise ContractError(f"attention: found {shapes}; expected {packed.num_tokens} tokens")
    if sliding_window is not None:
        _counted.count += 1
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = (heads.transpose(1, 2).flatten(0, 1).to(dtype) for heads in (query, key, value))
    output = causal_attention(query, key, value, packed, scaling, sliding_window, softcap, s_aux)
    return output.view(num_rows, length, *output.shape[1:]), None


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scaling: float | None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, H, E] of every sequence to itself, from query [T, H, D], key [T, K, D] and value [T, K, E] of one dtype.

    On CUDA in half precision by torch's variable-length flash attention, elsewhere, and where there are caps or sinks, over
    buckets of sequences of similar length.
    """
    if sinks is None and not softcap and _has_flash(query, key, value):
        return _flash(query, key, value, packed, scaling, window)
    return _bucketed(query, key, value, packed, scaling, window, softcap, sinks)


def _has_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    fits = value.shape[-1] <= key.shape[-1] == query.shape[-1] <= MAX_FLASH_DIM
    return fits and query.is_cuda and query.dtype in FLASH_DTYPES


@cache
def _flash_options() -> dict[str, Any]:
    """torch 2.12 added `enable_gqa`; before it, fewer key heads than query heads needed no option."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    bounds, length, width = packed.cu_seqlens, packed.max_length, value.shape[-1]
    if width < query.shape[-1]:  # the kernel knows one width alone
        value = F.pad(value, (0, query.shape[-1] - width))
    seen = (-1 if window is None else window - 1, 0)
    output = varlen_attn(query, key, value, bounds, bounds, length, length, scale=scaling, window_size=seen, **_flash_options())
    assert isinstance(output, Tensor)
    return output[..., :width]


def _bucketed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[T, H, E]: sequences padded on the right need no mask of their own, since no earlier query sees a later key."""
    outputs, plan = [], packed.plan
    buckets: list[tuple[Tensor | None, int, int]] = [(None, packed.num_sequences, packed.max_length)]
    if plan is not None:
        buckets = [(bucket.gather, bucket.num_sequences, bucket.length) for bucket in plan.buckets]
    for gather, num_sequences, length in buckets:
        rows = [states if gather is None else states.index_select(0, gather) for states in (query, key, value)]
        q, k, v = (states.view(num_sequences, length, *states.shape[1:]).transpose(1, 2) for states in rows)
        mask = None if window is None or window >= length else window_mask(length, window, query.device)
        output = padded_attention(q, k, v, mask, scaling, softcap, sinks)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return outputs[0] if plan is None else torch.cat(outputs).index_select(0, plan.restore)


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """bool [L, L]: which keys a query sees."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def padded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention [S, H, L, E] of S sequences to themselves, padded on the right: query [S, H, L, D], key [S, K, L, D] and
    value [S, K, L, E]. `mask` bool [L, L] says what a query sees, None for itself and all before it; `sinks` [H]."""
    groups, stores_scores = query.shape[1] // key.shape[1], bool(softcap) or sinks is not None
    if groups > 1 and (query.is_cuda or stores_scores):
        # CUDA's float32 kernels have no grouped heads: without this torch would take the one that stores all scores.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if stores_scores:
        return _stored_scores(query, key, value, mask, scaling, softcap, sinks)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


def _stored_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With all scores of a bucket in memory: no kernel of torch knows caps or sinks (arXiv:2408.00118, section 2; gpt-oss)."""
    length = query.shape[2]
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = window_mask(length, length, query.device) if mask is None else mask
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, torch.float64 if scores.dtype == torch.float64 else torch.float32)[..., :length]
    return weights.to(value.dtype) @ value

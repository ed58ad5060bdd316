"""Attention over packed sequences for any decoder of transformers, with windows, sinks and soft caps where layers have some:
no padding, and no [T, T] mask.

Shapes: T tokens of the packed microbatch, H query heads, K key heads, D head dimension, E of values, S sequences of a bucket of
length L.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from attrs import define, frozen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlcore.spi.errors import ContractError
from rlcore_torchkit.architectures.decoders import has_unpacked_layers, is_image_model
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.transformers_import import import_transformers

PACKED_ATTENTION = "rlcore_packed"
"""The name under which transformers knows it: `from_pretrained(..., attn_implementation=PACKED_ATTENTION)`."""
FLASH_DTYPES = (torch.float16, torch.bfloat16)
MAX_FLASH_DIM = 256
"""The largest head dimension of torch's variable-length flash attention."""


@frozen(eq=False)
class Scores:
    """The form of a layer's scores; by default plain causal attention."""

    scaling: float | None = None
    """The factor of products; None for 1 / sqrt(D)."""
    window: int | None = None
    """A token sees itself and the `window` - 1 before it; None for all of them."""
    softcap: float | None = None
    """Scores are softcap · tanh(score / softcap) (arXiv:2408.00118, section 2)."""
    sinks: Tensor | None = None
    """[H]: the score of a sink, whose value is zero (gpt-oss)."""

    @property
    def is_stored(self) -> bool:
        """Return whether no kernel of torch computes it, and all scores are in memory."""
        return bool(self.softcap) or self.sinks is not None


PLAIN = Scores()


class Attention(Protocol):
    """The keys and values that the tokens of a forward pass attend to."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """From query [T, H, D], key [T, K, D] and value [T, K, E] to [T, H · E]."""


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


@define
class _Kernels:
    """The kernels that may be taken."""

    is_plain: bool = False


_kernels = _Kernels()


@contextmanager
def plain_attention() -> Iterator[None]:
    """Compute attention by torch's plain kernel within the block: what the fused ones do is measured so."""
    before, _kernels.is_plain = _kernels.is_plain, True
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        _kernels.is_plain = before


def register_packed_attention() -> str:
    """Make packed attention known to transformers, once or more often; returns PACKED_ATTENTION.

    No mask function is registered on purpose: transformers then builds no mask, and reads nothing back from the device.
    """
    import_transformers()
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return PACKED_ATTENTION


def attention_of(config: Any, name: str) -> str | dict[str, str]:
    """Return the option that gives a language model's layers the attention `name`, or their own where packed attention does not
    compute them. A vision tower, which attends to all of an image, computes by torch's own."""
    content = config.to_dict()
    if is_image_model(content):
        return {"": name, "text_config": name, "vision_config": "sdpa"}
    return "eager" if has_unpacked_layers(content) else name


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedSequences | Attention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in the form that transformers' models call: causal, of every sequence to itself, or what `packed` is.

    query [1, H, T, D], key [1, K, T, D] and value [1, K, T, E]; returns [1, T, H, E]. Where the T tokens come as several rows
    of equal length, they are packed in the order of the rows. `sliding_window` and `s_aux` are the window and the sinks of
    Scores. ContractError for what it does not compute: masks, dropout, attention to later tokens.
    """
    if packed is None:
        raise ContractError("attention: found no `packed` argument; expected a model that hands keyword arguments on to it")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    extras = {"an attention mask": attention_mask is not None, "attention dropout": dropout > 0.0 and module.training}
    found = [extra for extra, present in (extras | {"attention to later tokens": not is_causal}).items() if present]
    if found:
        raise ContractError(f"attention: found {' and '.join(found)}; expected causal attention alone")
    num_rows, num_heads, length = query.shape[:3]
    num_tokens = packed.num_tokens if isinstance(packed, PackedSequences) else num_rows * length
    if num_rows * length != num_tokens or key.shape[2] != length:
        shapes = f"queries {list(query.shape)} and keys {list(key.shape)}"
        raise ContractError(f"attention: found {shapes}; expected {num_tokens} tokens")
    if sliding_window is not None:
        _counted.count += 1
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = (heads.transpose(1, 2).flatten(0, 1).to(dtype) for heads in (query, key, value))
    scores = Scores(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    if isinstance(packed, PackedSequences):
        output = causal_attention(query, key, value, packed, scores)
    else:
        output = packed(query, key, value, scores)
    return output.view(num_rows, length, num_heads, -1), None


def causal_attention(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scores: Scores) -> Tensor:
    """[T, H, E] of every sequence to itself, from query [T, H, D], key [T, K, D] and value [T, K, E] of one dtype.

    On CUDA in half precision by torch's variable-length flash attention, elsewhere, and where there are caps or sinks, over
    buckets of sequences of similar length.
    """
    if not scores.is_stored and not _kernels.is_plain and _has_flash(query, key, value):
        return _flash(query, key, value, packed, scores)
    return _bucketed(query, key, value, packed, scores)


def _has_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    fits = value.shape[-1] <= key.shape[-1] == query.shape[-1] <= MAX_FLASH_DIM
    return fits and query.is_cuda and query.dtype in FLASH_DTYPES


@cache
def _flash_options() -> dict[str, Any]:
    """torch 2.12 added `enable_gqa`; before it, fewer key heads than query heads needed no option."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _flash(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scores: Scores) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    bounds, length, width = packed.cu_seqlens, packed.max_length, value.shape[-1]
    if width < query.shape[-1]:  # the kernel knows one width alone
        value = F.pad(value, (0, query.shape[-1] - width))
    options: dict[str, Any] = {"scale": scores.scaling, "window_size": (-1 if scores.window is None else scores.window - 1, 0)}
    output = varlen_attn(query, key, value, bounds, bounds, length, length, **options, **_flash_options())
    assert isinstance(output, Tensor)
    return output[..., :width]


def _bucketed(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scores: Scores) -> Tensor:
    """[T, H, E]: sequences padded on the right need no mask of their own, since no earlier query sees a later key."""
    outputs, plan = [], packed.plan
    buckets: list[tuple[Tensor | None, int, int]] = [(None, packed.num_sequences, packed.max_length)]
    if plan is not None:
        buckets = [(bucket.gather, bucket.num_sequences, bucket.length) for bucket in plan.buckets]
    for gather, num_sequences, length in buckets:
        rows = [states if gather is None else states.index_select(0, gather) for states in (query, key, value)]
        q, k, v = (states.view(num_sequences, length, *states.shape[1:]).transpose(1, 2) for states in rows)
        output = padded_attention(q, k, v, scores)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return outputs[0] if plan is None else torch.cat(outputs).index_select(0, plan.restore)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """bool [L, L]: which keys a query sees."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window)


def padded_attention(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Causal attention [S, H, L, E] of S sequences to themselves, padded on the right: query [S, H, L, D], key [S, K, L, D] and
    value [S, K, L, E]."""
    groups, length, window = query.shape[1] // key.shape[1], query.shape[2], scores.window
    if groups > 1 and (query.is_cuda or scores.is_stored):
        # CUDA's float32 kernels have no grouped heads: without this torch would take the one that stores all scores.
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if scores.is_stored:
        return _stored_scores(query, key, value, scores)
    mask = None if window is None or window >= length else _window_mask(length, window, query.device)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scores.scaling, enable_gqa=True
    )


def _stored_scores(query: Tensor, key: Tensor, value: Tensor, form: Scores) -> Tensor:
    """Compute attention with all scores of a bucket in memory: no kernel of torch knows caps or sinks."""
    length = query.shape[2]
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if form.scaling is None else form.scaling)
    if form.softcap:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    seen = _window_mask(length, length if form.window is None else form.window, query.device)
    scores = scores.masked_fill(~seen, -torch.inf)
    if form.sinks is not None:
        scores = torch.cat([scores, form.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, torch.float64 if scores.dtype == torch.float64 else torch.float32)[..., :length]
    return weights.to(value.dtype) @ value

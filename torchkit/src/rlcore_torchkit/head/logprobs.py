"""Log-probabilities and entropy of a language model's tokens, without a [T, V] tensor of the whole microbatch.

Shapes: T rows, V vocabulary, H hidden size, C rows of a chunk.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from attrs import define
from torch import Tensor, nn

from rlcore.spi.arrays import Int64Array
from rlcore.spi.batch import Images
from rlcore.spi.errors import ContractError
from rlcore_torchkit.head.onednn import linear
from rlcore_torchkit.head.sampling_mask import KeptTokens, cap_slopes, head_logits
from rlcore_torchkit.head.softmax_chunks import (
    Upstream,
    WeightGradient,
    chunk_rows,
    has_kernels,
    logits_gradient,
    masks_of,
    rows_with_gradient,
    scaled_logits,
    wide_dtype,
)
from rlcore_torchkit.layers.attention import PackedSequences, SharedSequences

EntropyMode: TypeAlias = Literal["none", "metric", "loss"]
"""Modes of the entropy: not computed, computed without a gradient, or with one."""

ScaledLogits: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]
"""Float32 logits [C, V] from states [C, H], a head [V, H] and a temperature, which has divided them."""

Tokens: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int32 | np.int64]]"
WORTHWHILE = 0.95
"""Rows by tokens up to which beginnings are shared: gathering costs a little as well."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int | None = None,
    entropy: EntropyMode = "none",
    kept: KeptTokens | None = None,
    cap: float | None = None,
    scaled: ScaledLogits | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden weightᵀ / temperature) at the targets: float32 [T], and its entropy in nats: float32 [T] or None.
    With `kept`, of T rows, the softmax is over the kept tokens of each row, its target among them; gradients reach no others.
    With `cap` logits are `soft_capped` before the division.

    hidden [T, H] and weight [V, H] (the head's, no bias) get gradients; targets int64 [T]. The product is taken in hidden's
    dtype (under autocast in autocast's) and everything after it in float32, as samplers do; float64 stays float64. `scaled`
    takes the place of product and division; it knows of no cap.
    `chunk_tokens` rows at a time are held as logits, and the backward computes them again; None takes a few million.
    """
    hidden = head_states("token_logprobs", hidden, weight, targets, temperature)
    if chunk_tokens is None:
        chunk_tokens = chunk_rows(hidden.device.type, weight.shape[0])
    apply: Any = _TokenLogprobs.apply
    logprobs, entropies = apply(hidden, weight, targets, float(temperature), chunk_tokens, entropy, kept, cap, scaled)
    return logprobs, entropies


class _TokenLogprobs(torch.autograd.Function):
    """Gradients of row t, with p the softmax and z the scaled logits: ∂logp/∂z = onehot - p, ∂H/∂z = -p (log p + H).

    On CUDA kernels read each chunk's logits once and leave the gradient in their place; elsewhere torch's operations do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        entropy: EntropyMode,
        mask: KeptTokens | None,
        cap: float | None,
        scaled: ScaledLogits | None,
    ) -> tuple[Tensor, Tensor | None]:
        head = weight.to(hidden.dtype)
        num_rows, fused = hidden.shape[0], has_kernels(hidden)
        logprobs = torch.empty(num_rows, dtype=wide_dtype(hidden.dtype), device=hidden.device)
        entropies = torch.empty_like(logprobs) if entropy != "none" else None
        logsumexps = torch.empty_like(logprobs) if fused else None
        log_softmax = None
        product = None if scaled is None else partial(_divided, scaled, temperature)
        divisor = temperature if scaled is None else 1.0
        masks = masks_of(mask, chunk_tokens)
        for start, part in zip(range(0, num_rows, chunk_tokens), masks, strict=False):
            rows = slice(start, start + chunk_tokens)
            wanted = None if entropies is None else entropies[rows]
            if logsumexps is not None:
                from rlcore_torchkit.head.softmax_kernels import normalise

                logits = head_logits(hidden[rows], head, part, cap, product)
                normalise(logits, targets[rows], divisor, logprobs[rows], logsumexps[rows], wanted)
                continue
            logits = scaled_logits(head_logits(hidden[rows], head, part, cap, product), divisor)
            log_softmax = torch.log_softmax(logits, 1, dtype=logprobs.dtype)
            logprobs[rows] = log_softmax.gather(1, targets[rows, None])[:, 0]
            if wanted is not None:
                wanted.copy_(log_softmax.exp().mul_(log_softmax).sum(1).neg_())
        # One chunk is small by definition: keeping it saves the backward a matrix product, unless it needs the logits' slopes.
        kept = log_softmax if num_rows <= chunk_tokens and cap is None else None
        ctx.save_for_backward(hidden, weight, targets, entropies if entropy == "loss" else None, kept, logsumexps)
        ctx.temperature, ctx.chunk_tokens, ctx.mask, ctx.cap = temperature, chunk_tokens, mask, cap
        ctx.product, ctx.divisor = product, divisor
        if entropies is not None and entropy == "metric":
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, targets, entropies, kept, logsumexps = ctx.saved_tensors
        grad_entropy = grad_entropy if entropies is not None else None
        rows = rows_with_gradient(grad_logprobs, grad_entropy)
        if rows is None:
            return (None,) * 9
        head = weight.to(hidden.dtype)
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = WeightGradient(weight, hidden.dtype) if ctx.needs_input_grad[1] else None
        upstreams = Upstream.scaled_by(-1.0 / ctx.temperature, grad_logprobs, grad_entropy, entropies)
        masks = masks_of(None if ctx.mask is None or kept is not None else ctx.mask.select(rows), ctx.chunk_tokens)
        for chunk, part in zip(torch.split(rows, ctx.chunk_tokens), masks, strict=False):
            states, upstream = hidden.index_select(0, chunk), upstreams.select(chunk)
            logits = kept.index_select(0, chunk) if kept is not None else head_logits(states, head, part, ctx.cap, ctx.product)
            slopes = None if ctx.cap is None else cap_slopes(logits, ctx.cap)
            if logsumexps is not None:
                from rlcore_torchkit.head.softmax_kernels import gradient_

                grad_logits = gradient_(logits, logsumexps[chunk], targets[chunk], ctx.divisor, *upstream)
            else:
                logits = logits if kept is not None else scaled_logits(logits, ctx.divisor)
                dtype = hidden.dtype if slopes is None else logits.dtype
                grad_logits = logits_gradient(logits, kept is not None, targets[chunk, None], upstream, dtype)
            grad_logits = (grad_logits if slopes is None else grad_logits.mul_(slopes)).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, chunk, linear(grad_logits, head.T))
            if grad_weight is not None:
                grad_weight.add(grad_logits, states)
        return grad_hidden, grad_weight.total if grad_weight is not None else None, *(None,) * 7


@define
class _Product:
    """The product with the head."""

    is_wide: bool = False
    """True where it is taken in float32, whatever narrower dtype the model has."""


_product = _Product()


@contextmanager
def head_in_float32() -> Iterator[None]:
    """Take the product with the head in float32 within the block, or float64: what the model's dtype does is measured so. Under
    autocast the product keeps autocast's dtype."""
    before, _product.is_wide = _product.is_wide, True
    try:
        yield
    finally:
        _product.is_wide = before


def head_states(caller: str, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """`hidden` [T, H] in the dtype of its product with `weight` [rows, H]. ContractError, in the name of `caller`, for shapes
    or a temperature that do not fit."""
    if hidden.ndim != 2 or weight.ndim != 2 or targets.shape != hidden.shape[:1] or weight.shape[1] != hidden.shape[1]:
        found = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
        raise ContractError(f"{caller}: found {found}; expected [T, H], [rows, H], [T]")
    if not temperature > 0.0:
        raise ContractError(f"{caller}: found temperature {temperature}; expected a positive one")
    if _product.is_wide:
        return hidden.to(wide_dtype(hidden.dtype))
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def _divided(scaled: ScaledLogits, temperature: float, states: Tensor, head: Tensor) -> Tensor:
    return scaled(states, head, temperature)


def packed_forward(model: nn.Module, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """Hidden states [T, hidden] after the final norm of a transformers causal language model, without its head.

    `tokens`, int32 or int64 [T], are packed as `packed` says; every sequence sees only itself. The model must have been
    loaded with `attn_implementation=PACKED_ATTENTION`.
    """
    _check_tokens(tokens, packed)
    decoder: Any = model.base_model
    output = decoder(input_ids=tokens[None], position_ids=packed.position_ids, use_cache=False, packed=packed)
    hidden: Tensor = output.last_hidden_state
    return hidden.squeeze(0)


def shared_forward(model: nn.Module, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """Hidden states [T, hidden], as `packed_forward` computes them, by a row for each beginning in place of each token.

    On CPU alone; elsewhere, and where sequences have little in common, it is `packed_forward`. Nothing in the model may tell
    one token from another with the same beginning, as dropout does.
    """
    if tokens.device.type != "cpu":
        return packed_forward(model, tokens, packed)
    _check_tokens(tokens, packed)
    first, rows = common_beginnings(tokens.numpy(), packed.offsets, packed.owners)
    if len(first) > WORTHWHILE * len(rows):
        return packed_forward(model, tokens, packed)
    shared = SharedSequences.of(packed, torch.from_numpy(first), torch.from_numpy(rows))
    _ = shared.plan  # made now: what compiles layers cannot look into its making
    return packed_forward(model, tokens.index_select(0, shared.first), shared).index_select(0, shared.rows)


def _check_tokens(tokens: Tensor, packed: PackedSequences) -> None:
    if tokens.shape != (packed.num_tokens,):
        raise ContractError(f"tokens: found shape {list(tokens.shape)}; expected [{packed.num_tokens}], as the offsets say")


def common_beginnings(tokens: Tokens, offsets: Int64Array, owners: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
    """int64 [R]: a packed token of each row; and int64 [T]: the row of each packed token. Two tokens have one row where they,
    and all before them in their sequences, are the same, and their sequences have one owner. Rows are in the owners' order."""
    sequences = [tokens[start:end] for start, end in pairwise(offsets)]
    owner = np.zeros(len(sequences), np.int64) if owners is None else owners
    # In the order of their bytes, sequences with a common beginning are neighbours; which order that is does not matter.
    order = sorted(range(len(sequences)), key=lambda index: (owner[index], sequences[index].tobytes()))
    rows, first = np.empty(len(tokens), np.int64), []
    num_rows, before = 0, order[0]
    for index in order:
        start, end = int(offsets[index]), int(offsets[index + 1])
        common = 0 if index == before or owner[index] != owner[before] else _common(sequences[before], sequences[index])
        rows[start : start + common] = rows[offsets[before] : offsets[before] + common]
        rows[start + common : end] = np.arange(num_rows, num_rows + end - start - common)
        first.append(np.arange(start + common, end))
        num_rows, before = num_rows + end - start - common, index
    return np.concatenate(first), rows


def _common(one: Tokens, other: Tokens) -> int:
    """Tokens of the common beginning."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def packed_logprobs(
    model: nn.Module,
    tokens: Tensor,
    packed: PackedSequences,
    *,
    temperature: float,
    entropy: EntropyMode = "none",
    kept: KeptTokens | None = None,
    images: Images | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each token given those of its sequence before it, and the entropy there; float32 [T] each.

    Both are 0.0 at the first token of each sequence; the entropy is None for "none". `model` went through `patch_head`;
    `tokens` is int32 or int64 [T]. The head is applied only where a next token follows in the same sequence. With `kept`, of
    T rows, each token's softmax is over the tokens of its row. `images` are what each sequence reads, of a model that reads
    images.
    """
    read = {} if images is None else {"images": images}
    logprobs, entropies = model(input_ids=tokens, packed=packed, temperature=temperature, entropy=entropy, kept=kept, **read)
    return logprobs, entropies


class HeadLogprobs(Protocol):
    """Log-probabilities and entropies [R] of `targets`, int64 [R], from the hidden states [R, H] before them; over the kept
    tokens of each row where `kept` says so."""

    def __call__(
        self, hidden: Tensor, *, targets: Tensor, temperature: float, entropy: EntropyMode, kept: KeptTokens | None
    ) -> tuple[Tensor, Tensor | None]: ...


Decode: TypeAlias = Callable[..., Tensor]
"""Hidden states [T, hidden] after a model's final norm, as `packed_forward` computes them from model, tokens and sequences;
with the keyword `images` where the model reads images and a sequence has some."""


def patch_head(model: nn.Module, compute: HeadLogprobs | None = None, decode: Decode = packed_forward) -> None:
    """Make a transformers causal language model return `packed_logprobs` from its forward, in place of logits.

    `compute` takes the place of `token_logprobs` with the head's weight, and of a bias that the head has.

    The call stays one call of the root module, so whatever wraps it (FSDP2, which gathers embeddings, final norm and head
    only during the root's forward) works unchanged, and so do all parameter names.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if compute is None and getattr(head, "bias", None) is not None:
        raise ContractError("patch_head: found a head with a bias; expected one without")
    model.forward = partial(_policy_forward, model, compute or own_head(model), decode)


def own_head(model: Any, cap: float | None = None, scaled: ScaledLogits | None = None) -> HeadLogprobs:
    """`token_logprobs` with the weight that the model's head has when it is called: FSDP puts another in its place."""
    return partial(_own_head, model, cap=cap, scaled=scaled)  # no closure: a copy of the model has to refer to its own head


def _own_head(model: Any, hidden: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
    return token_logprobs(hidden, model.get_output_embeddings().weight, **options)


def _policy_forward(
    model: nn.Module,
    compute: HeadLogprobs,
    decode: Decode,
    input_ids: Tensor,
    packed: PackedSequences,
    temperature: float,
    entropy: EntropyMode,
    kept: KeptTokens | None = None,
    images: Images | None = None,
) -> tuple[Tensor, Tensor | None]:
    hidden = decode(model, input_ids, packed) if images is None else decode(model, input_ids, packed, images=images)
    predicting = packed.predicting
    targets = input_ids.index_select(0, predicting + 1).long()
    states = hidden.index_select(0, predicting)
    chosen = None if kept is None else kept.select(predicting + 1)
    results = compute(states, targets=targets, temperature=temperature, entropy=entropy, kept=chosen)
    aligned = [None if values is None else _align(values, predicting + 1, packed.num_tokens) for values in results]
    assert aligned[0] is not None
    return aligned[0], aligned[1]


def _align(values: Tensor, places: Tensor, num_tokens: int) -> Tensor:
    return values.new_zeros(num_tokens).index_copy(0, places, values)

"""Log-probabilities and entropy of a language model's tokens, without a [T, V] tensor of the whole microbatch.

Shapes: T rows, V vocabulary, H hidden size, C rows of a chunk.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from itertools import repeat
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from rlcore.spi.errors import ContractError
from rlcore.spi.images import Images
from rlcore_torchkit.head.onednn import add_weight_gradient, linear
from rlcore_torchkit.head.sampling_mask import KeptTokens, head_logits
from rlcore_torchkit.head.soft_cap import cap_slopes
from rlcore_torchkit.layers.attention import PackedSequences, packed_forward

EntropyMode: TypeAlias = Literal["none", "metric", "loss"]
"""Whether the entropy is computed: not at all, without a gradient, or with one."""

ScaledLogits: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]
"""Float32 logits [C, V] from states [C, H], a head [V, H] and a temperature, which has divided them."""

_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 3 * 2**26}
"""Logits of one chunk where the caller does not say: large enough for efficient products, small beside a model."""


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
                grad_logits = _grad_logits(logits, kept is not None, targets[chunk, None], upstream, dtype)
            grad_logits = (grad_logits if slopes is None else grad_logits.mul_(slopes)).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, chunk, linear(grad_logits, head.T))
            if grad_weight is not None:
                grad_weight.add(grad_logits, states)
        return grad_hidden, grad_weight.total if grad_weight is not None else None, *(None,) * 7


class Upstream(NamedTuple):
    """Gradients of a chunk's log-probabilities and entropies, divided by -temperature: [C] each."""

    scaled: Tensor
    """The gradients of the log-probabilities."""
    reached: Tensor | None
    """The gradients of the entropies H; None where they have none."""
    shift: Tensor | None
    """H · reached + scaled."""

    @classmethod
    def scaled_by(
        cls, scale: float, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, entropies: Tensor | None
    ) -> "Upstream":
        """Scale the gradients [T], of which at least one is there; `entropies` [T] are given where theirs is."""
        given = grad_logprobs if grad_logprobs is not None else grad_entropy
        assert given is not None
        scaled = torch.zeros_like(given) if grad_logprobs is None else grad_logprobs * scale
        if grad_entropy is None or entropies is None:
            return cls(scaled, None, None)
        reached = grad_entropy * scale
        return cls(scaled, reached, entropies * reached + scaled)

    def select(self, rows: Tensor) -> "Upstream":
        """The gradients of these rows, int64 [rows], alone."""
        scaled, reached, shift = self
        return Upstream(scaled[rows], None if reached is None else reached[rows], None if shift is None else shift[rows])


def head_states(caller: str, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """`hidden` [T, H] in the dtype of its product with `weight` [rows, H]. ContractError, in the name of `caller`, for shapes
    or a temperature that do not fit."""
    if hidden.ndim != 2 or weight.ndim != 2 or targets.shape != hidden.shape[:1] or weight.shape[1] != hidden.shape[1]:
        found = f"hidden {list(hidden.shape)}, weight {list(weight.shape)}, targets {list(targets.shape)}"
        raise ContractError(f"{caller}: found {found}; expected [T, H], [rows, H], [T]")
    if not temperature > 0.0:
        raise ContractError(f"{caller}: found temperature {temperature}; expected a positive one")
    device = hidden.device.type
    return hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden


def chunk_rows(device: str, num_columns: int) -> int:
    """Rows of logits that one chunk holds where the caller does not say."""
    return max(1, _CHUNK_ELEMENTS.get(device, _CHUNK_ELEMENTS["cuda"]) // num_columns)


def _divided(scaled: ScaledLogits, temperature: float, states: Tensor, head: Tensor) -> Tensor:
    return scaled(states, head, temperature)


def has_kernels(hidden: Tensor) -> bool:
    """Whether the CUDA kernels serve this tensor; they come with Triton, as torch's CUDA builds for Linux do."""
    return hidden.is_cuda and hidden.dtype != torch.float64 and hidden.shape[0] > 0 and find_spec("triton") is not None


def _grad_logits(logits: Tensor, normalised: bool, chosen: Tensor, upstream: Upstream, dtype: torch.dtype) -> Tensor:
    """[C, V] in `dtype`, by torch's operations. `logits` are the scaled logits, or where `normalised` their log-softmax."""
    scaled, reached, shift = upstream
    if reached is None or shift is None:
        return _grad_of_logprobs(logits, normalised, chosen, scaled[:, None], dtype)
    return _grad_with_entropy(logits, normalised, chosen, scaled[:, None], reached[:, None], shift[:, None]).to(dtype)


def _grad_of_logprobs(logits: Tensor, normalised: bool, chosen: Tensor, scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """[C, V] in `dtype`: (p - onehot) scaled, with `scaled` [C, 1] the upstream gradient by -temperature.

    `logits` are the scaled logits, or where `normalised` their log-softmax, which is overwritten.
    """
    wide = wide_dtype(dtype)
    softmax = logits.exp_() if normalised else torch.softmax(logits, 1, dtype=wide)
    softmax.scatter_add_(1, chosen, torch.full_like(scaled, -1.0))
    narrow = softmax if dtype == wide else torch.empty_like(softmax, dtype=dtype)
    return torch.mul(softmax, scaled, out=narrow)


def _grad_with_entropy(
    logits: Tensor, normalised: bool, chosen: Tensor, scaled: Tensor, reached: Tensor, shift: Tensor
) -> Tensor:
    """[C, V]: p (log p · reached + shift) - onehot · scaled, all of them upstream gradients [C, 1] by -temperature."""
    log_softmax = logits if normalised else torch.log_softmax(logits, 1, dtype=scaled.dtype)
    softmax = log_softmax.exp()
    torch.addcmul(shift, log_softmax, reached, out=log_softmax)
    return softmax.mul_(log_softmax).scatter_add_(1, chosen, -scaled)


class WeightGradient:
    """Sum of gradᵀ hidden over chunks, accumulated in float32 whatever the factors' dtype."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.total = torch.zeros(weight.shape, dtype=wide_dtype(dtype), device=weight.device)

    def add(self, grad_logits: Tensor, states: Tensor) -> None:
        if grad_logits.dtype == self.total.dtype:
            add_weight_gradient(self.total, grad_logits, states)
        elif grad_logits.is_cuda:
            torch.addmm(self.total, grad_logits.T, states, out_dtype=self.total.dtype, out=self.total)
        else:
            self.total += grad_logits.T @ states


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled_logits(logits: Tensor, temperature: float) -> Tensor:
    """[C, V]: divided after the cast to float32, as samplers do; not cast at all where there is nothing to divide. Wide logits
    are overwritten."""
    if temperature == 1.0:
        return logits
    # Not a 0-dim tensor: those do not take part in type promotion, so this divides and casts in one pass.
    divisor = torch.full((1, 1), temperature, dtype=wide_dtype(logits.dtype), device=logits.device)
    return logits.div_(divisor) if logits.dtype == divisor.dtype else logits / divisor


def masks_of(kept: KeptTokens | None, chunk_tokens: int) -> Iterable[KeptTokens | None]:
    """What each chunk of rows is normalised over, one after another; None for each where that is the whole vocabulary."""
    return repeat(None) if kept is None else kept.split(chunk_tokens)


def rows_with_gradient(*gradients: Tensor | None) -> Tensor | None:
    """int64: rows that any of the gradients [T] reaches; None where there is none. Masked tokens cost no backward."""
    reached = [gradient != 0 for gradient in gradients if gradient is not None]
    if not reached:
        return None
    return (reached[0] if len(reached) == 1 else reached[0] | reached[1]).nonzero()[:, 0]


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

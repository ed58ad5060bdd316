"""Log-probabilities and entropy where each rank of a group holds some rows of the head: logits are never gathered.

Shapes: T rows, V vocabulary in all, W of it on this rank, H hidden size, C rows of a chunk.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore_torchkit.head.logprobs import EntropyMode, head_states
from rlcore_torchkit.head.sampling_mask import KeptTokens, cap_slopes, head_logits
from rlcore_torchkit.head.softmax_chunks import (
    Upstream,
    WeightGradient,
    chunk_rows,
    has_kernels,
    masks_of,
    rows_with_gradient,
    scaled_logits,
    wide_dtype,
)


def vocabulary_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    first: int,
    group: dist.ProcessGroup,
    temperature: float,
    chunk_tokens: int | None = None,
    entropy: EntropyMode = "none",
    kept: KeptTokens | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `token_logprobs`, with `weight` [W, H] the head's rows from `first` on and the others on the other ranks of `group`.
    `kept` has ids of the whole vocabulary.

    `hidden` [T, H] and `targets` int64 [T], in the whole vocabulary, are the same on every rank, and so are the results. Two
    sums over ranks of [T] each are all that travels. The gradient of `hidden` is this rank's part: add up those of the ranks.
    """
    hidden = head_states("vocabulary_parallel_logprobs", hidden, weight, targets, temperature)
    chunk_tokens = chunk_tokens or chunk_rows(hidden.device.type, weight.shape[0])
    options = _Options(first, group, float(temperature), chunk_tokens, entropy, cap)
    apply: Any = _VocabularyParallel.apply
    own = None if kept is None else kept.part(first, weight.shape[0])
    logprobs, entropies = apply(hidden, weight, targets, options, own)
    return logprobs, entropies


class _Options(NamedTuple):
    first: int
    group: dist.ProcessGroup
    temperature: float
    chunk_tokens: int
    entropy: EntropyMode
    cap: float | None


class _Part(NamedTuple):
    """A rank's part of each row's softmax: [T] each, with z the scaled logits of its part of the vocabulary."""

    base: Tensor
    """A number near the greatest z."""
    mass: Tensor
    """Σ exp(z - base)."""
    weighted: Tensor | None
    """Σ exp(z - base) (z - base); None where the entropy is not wanted."""
    chosen: Tensor
    """z at the target, where it is in this part."""

    @classmethod
    def empty(cls, num_rows: int, like: Tensor, *, has_entropy: bool) -> "_Part":
        base, mass, chosen, weighted = (like.new_empty(num_rows, dtype=wide_dtype(like.dtype)) for _ in range(4))
        return cls(base, mass, weighted if has_entropy else None, chosen)

    def rows(self, rows: slice) -> "_Part":
        weighted = None if self.weighted is None else self.weighted[rows]
        return _Part(self.base[rows], self.mass[rows], weighted, self.chosen[rows])


class _VocabularyParallel(torch.autograd.Function):
    """The gradients are those of `token_logprobs`, of this rank's columns, from the log-sum-exp over all of them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: _Options, mask: KeptTokens | None
    ) -> tuple[Tensor, Tensor | None]:
        head = weight.to(hidden.dtype)
        places = targets - options.first
        places = places.masked_fill((places < 0) | (places >= weight.shape[0]), -1)
        part = _Part.empty(len(targets), hidden, has_entropy=options.entropy != "none")
        masks = masks_of(mask, options.chunk_tokens)
        for start, own in zip(range(0, len(targets), options.chunk_tokens), masks, strict=False):
            rows = slice(start, start + options.chunk_tokens)
            logits = head_logits(hidden[rows], head, own, options.cap)
            _normalise(logits, places[rows].clamp(min=0), options.temperature, part.rows(rows))
        logprobs, logsumexps, entropies = _combine(part, places >= 0, options.group)
        ctx.save_for_backward(hidden, weight, places, entropies if options.entropy == "loss" else None, logsumexps)
        ctx.options, ctx.mask = options, mask
        if entropies is not None and options.entropy == "metric":
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> Any:
        hidden, weight, places, entropies, logsumexps = ctx.saved_tensors
        grad_entropy = grad_entropy if entropies is not None else None
        rows = rows_with_gradient(grad_logprobs, grad_entropy)
        if rows is None:
            return (None,) * 5
        head, temperature, cap = weight.to(hidden.dtype), ctx.options.temperature, ctx.options.cap
        grad_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = WeightGradient(weight, hidden.dtype) if ctx.needs_input_grad[1] else None
        upstreams = Upstream.scaled_by(-1.0 / temperature, grad_logprobs, grad_entropy, entropies)
        masks = masks_of(None if ctx.mask is None else ctx.mask.select(rows), ctx.options.chunk_tokens)
        for chunk, own in zip(torch.split(rows, ctx.options.chunk_tokens), masks, strict=False):
            states, upstream = hidden.index_select(0, chunk), upstreams.select(chunk)
            logits = head_logits(states, head, own, cap)
            slopes = None if cap is None else cap_slopes(logits, cap)
            grad_logits = _grad_logits(logits, places[chunk], temperature, logsumexps[chunk], upstream)
            if slopes is not None:
                grad_logits = grad_logits.mul_(slopes)
            grad_logits = grad_logits.to(states.dtype)
            if grad_hidden is not None:
                grad_hidden.index_copy_(0, chunk, grad_logits @ head)
            if grad_weight is not None:
                grad_weight.add(grad_logits, states)
        return grad_hidden, grad_weight.total if grad_weight is not None else None, None, None, None


def _normalise(logits: Tensor, places: Tensor, temperature: float, into: _Part) -> None:
    """Fill `into` [C] for logits [C, W], which may be overwritten; `places` int64 [C] are columns to read."""
    if has_kernels(logits):
        from rlcore_torchkit.head.softmax_kernels import normalise

        normalise(logits, places, temperature, into.chosen, into.base, into.weighted)
        into.chosen.add_(into.base)
        into.mass.fill_(1.0)
        if into.weighted is not None:
            into.weighted.neg_()  # the entropy of this part's own softmax, whose log-sum-exp is the base
        return
    logits = scaled_logits(logits, temperature).to(into.base.dtype)
    into.chosen.copy_(logits.gather(1, places[:, None])[:, 0])
    torch.amax(logits, 1, out=into.base)
    logits = logits.sub_(into.base[:, None])
    shares = logits.exp()
    torch.sum(shares, 1, out=into.mass)
    if into.weighted is not None:
        torch.sum(shares.mul_(logits), 1, out=into.weighted)


def _combine(part: _Part, is_here: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probabilities, log-sum-exps and entropies over the whole vocabulary: [T] each."""
    greatest = part.base.clone()
    dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=group)
    offset = part.base - greatest
    share = offset.exp()
    sums = [part.mass * share, torch.where(is_here, part.chosen - greatest, 0.0)]
    if part.weighted is not None:
        sums.append((part.weighted + part.mass * offset) * share)
    total = torch.stack(sums)
    dist.all_reduce(total, group=group)
    log_mass = total[0].log()
    entropies = None if part.weighted is None else log_mass - total[2] / total[0]
    return total[1] - log_mass, greatest + log_mass, entropies


def _grad_logits(logits: Tensor, places: Tensor, temperature: float, logsumexps: Tensor, upstream: Upstream) -> Tensor:
    """[C, W]: p (log p · reached + shift) - onehot · scaled, from logits [C, W], which may be overwritten; place -1 where the
    target is elsewhere."""
    if has_kernels(logits):
        from rlcore_torchkit.head.softmax_kernels import gradient_

        return gradient_(logits, logsumexps, places, temperature, *upstream)
    scaled, reached, shift = upstream
    log_softmax = scaled_logits(logits, temperature).to(logsumexps.dtype).sub_(logsumexps[:, None])
    gradient = log_softmax.exp()
    if reached is None or shift is None:
        gradient.mul_(scaled[:, None])
    else:
        gradient.mul_(torch.addcmul(shift[:, None], log_softmax, reached[:, None], out=log_softmax))
    at_target = torch.where(places >= 0, -scaled, 0.0)
    return gradient.scatter_add_(1, places.clamp(min=0)[:, None], at_target[:, None])

"""The independent implementation that backends are measured against."""

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rlcore.spi import LossSpec, SamplingMask, SamplingParams, TokenBatch
from rlcore.spi.arrays import BoolArray, Int16Array, Int32Array
from rlcore_conformance.references.tensors import Values

Float64Array: TypeAlias = NDArray[np.float64]
LEFT_OUT = -1e12
"""In place of a logit of -inf: the probability is 0 all the same, and times this logit it is 0 and not NaN."""


class ReferencePolicy(Protocol):
    """A model with given weights."""

    def logits(self, tokens: Int32Array) -> Float64Array:
        """float64 [L, V]: row i predicts the token after tokens[:i + 1], of one sequence alone."""

    def gradient_norm(self, batch: TokenBatch, loss: LossSpec, temperature: float) -> float:
        """Global L2 norm of the loss's gradient with respect to all weights, `batch` being the whole optimizer step."""


class RoutedPolicy(ReferencePolicy, Protocol):
    """A mixture-of-experts model with given weights. L layers, K experts of a token in each."""

    num_experts: int

    def choices(self, tokens: Int32Array) -> tuple[Int16Array, Float64Array]:
        """Return the experts to which the routers send the tokens of one sequence: int16 [T, L, K], -1 in layers without
        experts; and [T, L] how much more probable the last expert chosen is than the next one, infinite in layers without."""

    def routed_logits(self, tokens: Int32Array, routed: Int16Array) -> Float64Array:
        """Return `logits` with tokens sent to given experts, int16 [T, L, K]; where it is -1 the routers choose."""


class ReferenceValues(Protocol):
    """A model of values with given weights."""

    def values(self, tokens: Int32Array) -> Float64Array:
        """float64 [L]: the value after each token of one sequence alone."""

    def gradient_norm(self, batch: TokenBatch, loss: LossSpec) -> float:
        """Global L2 norm of the loss's gradient with respect to all weights, `batch` being the whole optimizer step."""


class Reference(Protocol):
    """Makes models of the architecture at hand."""

    vocab_size: int

    def load(self, weights: Values) -> ReferencePolicy:
        """A model with exactly these weights; raises where a name is missing or unknown."""


def log_softmax(logits: Float64Array) -> Float64Array:
    """Return the log-softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def left_out(mask: SamplingMask, vocab_size: int) -> BoolArray:
    """bool [T, V]: True at each token that was not kept; nowhere in the row of a token that was chosen among all."""
    out = np.zeros((len(mask), vocab_size), np.bool_)
    for row, (start, end) in enumerate(zip(mask.offsets[:-1], mask.offsets[1:], strict=True)):
        if end > start:
            out[row] = ~np.isin(np.arange(vocab_size), mask.tokens[start:end])
    return out


def reference_logprobs(policy: ReferencePolicy, batch: TokenBatch, temperature: float) -> tuple[Float64Array, Float64Array]:
    """Log-probabilities and entropies of a packed batch, float64 [T] each, 0.0 at first tokens; each sequence run alone. Where
    the batch has a sampling mask, over the kept tokens."""
    logprobs, entropy = np.zeros(batch.num_tokens), np.zeros(batch.num_tokens)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = batch.tokens[start:end]
        logits = policy.logits(tokens)[:-1] / temperature
        if batch.sampling_mask is not None:
            logits[left_out(batch.sampling_mask.slice(start + 1, end), logits.shape[-1])] = LEFT_OUT
        table = log_softmax(logits)
        logprobs[start + 1 : end] = table[np.arange(len(table)), tokens[1:]]
        entropy[start + 1 : end] = -(np.exp(table) * table).sum(axis=-1)
    return logprobs, entropy


def reference_values(model: ReferenceValues, batch: TokenBatch) -> Float64Array:
    """float64 [T]: the values of a packed batch; each sequence run alone."""
    pairs = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    return np.concatenate([model.values(batch.tokens[start:end]) for start, end in pairs])


def sampling_distribution(logits: Float64Array, sampling: SamplingParams) -> tuple[Float64Array, Float64Array]:
    """Log-probabilities of the distribution sampled from, float64 [L, V], -inf where truncated; and [L] the distance of
    the nearest rival to the truncation's edge, below which rounding decides what is kept.

    At temperature 0 the distribution is neither tempered nor truncated.
    """
    if sampling.temperature == 0.0:
        return log_softmax(logits), np.full(len(logits), np.inf)
    table = log_softmax(logits / sampling.temperature)
    margin = np.full(len(table), np.inf)
    order = np.argsort(-table, axis=-1, kind="stable")
    ranked = np.take_along_axis(table, order, axis=-1)
    if 0 < sampling.top_k < table.shape[-1]:
        margin = np.minimum(margin, ranked[:, sampling.top_k - 1] - ranked[:, sampling.top_k])
        ranked[:, sampling.top_k :] = -np.inf
        ranked = log_softmax(ranked)
    if sampling.top_p < 1.0:
        mass_before = np.cumsum(np.exp(ranked), axis=-1) - np.exp(ranked)
        margin = np.minimum(margin, np.abs(mass_before - sampling.top_p).min(axis=-1))
        ranked[mass_before >= sampling.top_p] = -np.inf
        ranked = log_softmax(ranked)
    out = np.empty_like(ranked)
    np.put_along_axis(out, order, ranked, axis=-1)
    return out, margin

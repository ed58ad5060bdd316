"""The policy of the fakes: a softmax over logits that three small tables add up to.

The logits of the token at position p of a sequence are

    transition[previous token] + origin[first token of the sequence] + position[p mod NUM_POSITIONS]

so that a wrong neighbour, a lost beginning and positions that don't restart with each sequence all change them. Gradients
are written out by hand. Shape suffixes: T tokens, M tokens that have a log-probability, C distinct contexts, V vocabulary.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.spi import LoraSpec, RankInfo, SamplingMask, SetResidencyRequest, SetResidencyResult
from rlcore.spi.arrays import AnyArray, BoolArray, Int32Array, Int64Array
from rlcore.spi.weights import VALUE_HEAD_WEIGHT

Float64Array: TypeAlias = NDArray[np.float64]
Weights: TypeAlias = Mapping[str, AnyArray]

NUM_POSITIONS = 4
TRANSITION, ORIGIN, POSITION = "transition.weight", "origin.weight", "position.weight"
NAMES = (TRANSITION, ORIGIN, POSITION)
LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"
LEFT_OUT = -1e12
"""The logit of a token that sampling had left out: its probability is 0, and 0 times it is 0 still."""


def make_weights(vocab_size: int, seed: int, scale: float) -> dict[str, NDArray[np.float32]]:
    """Normal weights of standard deviation `scale`, float32: [V, V], [V, V] and [NUM_POSITIONS, V]."""
    generator = np.random.default_rng(seed)
    rows = {TRANSITION: vocab_size, ORIGIN: vocab_size, POSITION: NUM_POSITIONS}
    return {name: (scale * generator.standard_normal((n, vocab_size))).astype(np.float32) for name, n in rows.items()}


def adapter_names(lora: LoraSpec) -> list[str]:
    """Names of A [rank, in] and B [out, rank] of the tables that `lora.targets` names, such as "transition"."""
    return [f"{target}.{key}" for target in lora.targets for key in (LORA_A, LORA_B)]


def adapted(weights: Weights, adapter: Weights, lora: LoraSpec) -> dict[str, AnyArray]:
    """The tables as an adapter changes them: W + scale · B A, in float64 and then in the dtype of W."""
    tables = dict(weights)
    for target in lora.targets:
        a, b = (adapter[f"{target}.{key}"].astype(np.float64) for key in (LORA_A, LORA_B))
        table = tables[f"{target}.weight"]
        tables[f"{target}.weight"] = (table + lora.scale * (b @ a)).astype(table.dtype)
    return tables


def logits(weights: Weights, first: Int64Array, previous: Int64Array, position: Int64Array) -> Float64Array:
    """float64 [C, V]: logits after the contexts given by their first and previous tokens and the position, [C] each."""
    table = weights[TRANSITION].astype(np.float64)[previous] + weights[ORIGIN].astype(np.float64)[first]
    return np.asarray(table + weights[POSITION].astype(np.float64)[position % NUM_POSITIONS])


def log_softmax(values: Float64Array) -> Float64Array:
    """Return the log-softmax over the last axis."""
    shifted = values - values.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def left_out(mask: SamplingMask, vocab_size: int) -> BoolArray:
    """bool [T, V]: what was left out where each token was chosen."""
    out = np.zeros((len(mask), vocab_size), np.bool_)
    out[mask.lengths > 0] = True
    out[np.repeat(np.arange(len(mask)), mask.lengths), mask.tokens] = False
    return out


@frozen(kw_only=True, eq=False)
class Contexts:
    """The distinct contexts of a packed batch: log-probabilities are computed once for each."""

    has_logprob: BoolArray
    """bool [T]: False at the first token of each sequence."""
    targets: Int64Array
    """int64 [M]: the tokens that have a log-probability."""
    which: Int64Array
    """int64 [M]: their contexts, as indices of the three arrays below."""
    first: Int64Array
    """int64 [C]"""
    previous: Int64Array
    """int64 [C]"""
    position: Int64Array
    """int64 [C]: modulo NUM_POSITIONS."""
    left_out: BoolArray | None = None
    """bool [C, V]: what truncated sampling had left out; None where that is nothing."""

    @classmethod
    def of(
        cls, tokens: Int32Array, offsets: Int64Array, vocab_size: int, sampling_mask: SamplingMask | None = None
    ) -> "Contexts":
        """The contexts of sequences `tokens` int32 [T], `offsets` int64 [N+1]."""
        lengths = np.diff(offsets)
        starts = np.repeat(offsets[:-1], lengths)
        position = np.arange(len(tokens), dtype=np.int64) - starts
        has_logprob = position > 0
        later = np.flatnonzero(has_logprob)
        if sampling_mask is not None:
            return cls(
                has_logprob=has_logprob,
                targets=tokens[later].astype(np.int64),
                which=np.arange(len(later)),
                first=tokens[starts[later]].astype(np.int64),
                previous=tokens[later - 1].astype(np.int64),
                position=position[later] % NUM_POSITIONS,
                left_out=left_out(sampling_mask, vocab_size)[later],
            )
        shape = (vocab_size, vocab_size, NUM_POSITIONS)
        keys = np.ravel_multi_index((tokens[starts[later]], tokens[later - 1], position[later] % NUM_POSITIONS), shape)
        distinct, which = np.unique(keys, return_inverse=True)
        first, previous, phase = np.unravel_index(distinct, shape)
        targets = tokens[later].astype(np.int64)
        return cls(has_logprob=has_logprob, targets=targets, which=which, first=first, previous=previous, position=phase)


@frozen(kw_only=True, eq=False)
class Forward:
    """Log-probabilities and entropies of a batch, with what their gradient needs."""

    contexts: Contexts
    table: Float64Array
    """float64 [C, V]: log-probabilities of every token after every context."""
    temperature: float

    @classmethod
    def of(cls, weights: Weights, contexts: Contexts, temperature: float) -> "Forward":
        """Evaluate the policy after each context."""
        values = logits(weights, contexts.first, contexts.previous, contexts.position)
        if contexts.left_out is not None:
            values = np.where(contexts.left_out, LEFT_OUT, values)
        return cls(contexts=contexts, table=log_softmax(values / temperature), temperature=temperature)

    def logprobs(self) -> Float64Array:
        """float64 [T], 0.0 at first tokens."""
        out = np.zeros(len(self.contexts.has_logprob))
        out[self.contexts.has_logprob] = self.table[self.contexts.which, self.contexts.targets]
        return out

    def context_entropy(self) -> Float64Array:
        """float64 [C] in nats."""
        return np.asarray(-(np.exp(self.table) * self.table).sum(axis=1))

    def entropy(self) -> Float64Array:
        """float64 [T] in nats, 0.0 at first tokens."""
        out = np.zeros(len(self.contexts.has_logprob))
        out[self.contexts.has_logprob] = self.context_entropy()[self.contexts.which]
        return out

    def gradients(self, weights: Weights, logprob_grads: Float64Array, entropy_grads: Float64Array) -> dict[str, Float64Array]:
        """float64 gradients of the three tables, given those of the log-probabilities and entropies, float64 [T] each."""
        num_contexts, vocab_size = self.table.shape
        which, later = self.contexts.which, self.contexts.has_logprob
        cells = np.bincount(
            which * vocab_size + self.contexts.targets, logprob_grads[later], num_contexts * vocab_size
        ).reshape(num_contexts, vocab_size)
        probabilities = np.exp(self.table)
        # d log p[j] / d logit[k] = [j = k] - p[k], and d H / d logit[k] = -p[k] (log p[k] + H)
        logit_grads = cells - cells.sum(axis=1, keepdims=True) * probabilities
        entropy_weights = np.bincount(which, entropy_grads[later], num_contexts)[:, None]
        logit_grads -= entropy_weights * probabilities * (self.table + self.context_entropy()[:, None])
        rows = {TRANSITION: self.contexts.previous, ORIGIN: self.contexts.first, POSITION: self.contexts.position}
        grads = {name: np.zeros(weights[name].shape) for name in NAMES}
        for name, indices in rows.items():
            np.add.at(grads[name], indices, logit_grads / self.temperature)
        return grads


def count_residency(
    rank_info: RankInfo, request: SetResidencyRequest, *, weight_bytes: int, state_bytes: int
) -> SetResidencyResult:
    """Return the memory that would be left on the device; on CPU, where both places are one, everything."""
    is_one_memory = rank_info.device == "cpu"
    weights = weight_bytes if is_one_memory or request.weights == "device" else 0
    state = state_bytes if is_one_memory or request.state == "device" else 0
    return SetResidencyResult(device_bytes=weights + state)


VALUES_PATH = "values"
"""The model path that stands for a directory which holds a head of values."""


def make_value_weights(vocab_size: int, seed: int, scale: float, path: str) -> dict[str, NDArray[np.float32]]:
    """The policy's tables and `score.weight` float32 [1, V]: random where the model's path is VALUES_PATH, and else zero."""
    row = np.random.default_rng([seed, 1]).standard_normal((1, vocab_size)) * (scale if path == VALUES_PATH else 0.0)
    return {**make_weights(vocab_size, seed, scale), VALUE_HEAD_WEIGHT: row.astype(np.float32)}


@frozen(kw_only=True, eq=False)
class ValueForward:
    """Values of a batch, with what their gradient needs."""

    first: Int64Array
    """int64 [T]: the first token of each token's sequence."""
    tokens: Int64Array
    """int64 [T]"""
    position: Int64Array
    """int64 [T]: of the token that would come next."""
    states: Float64Array
    """float64 [T, V]: the logits after each token."""
    score: Float64Array
    """float64 [V]"""

    @classmethod
    def of(cls, weights: Weights, tokens: Int32Array, offsets: Int64Array) -> "ValueForward":
        """Read every token of sequences `tokens` int32 [T], `offsets` int64 [N+1]."""
        starts = np.repeat(offsets[:-1], np.diff(offsets))
        first, read, position = tokens[starts].astype(np.int64), tokens.astype(np.int64), np.arange(len(tokens)) - starts + 1
        score = weights[VALUE_HEAD_WEIGHT].astype(np.float64)[0]
        states = logits(weights, first, read, position)
        return cls(first=first, tokens=read, position=position, states=states, score=score)

    def values(self) -> Float64Array:
        """float64 [T]"""
        return np.asarray(self.states @ self.score)

    def gradients(self, weights: Weights, value_grads: Float64Array) -> dict[str, Float64Array]:
        """float64 gradients of all weights, given those of the values, float64 [T]."""
        rows = {TRANSITION: self.tokens, ORIGIN: self.first, POSITION: self.position % NUM_POSITIONS}
        grads = {name: np.zeros(weights[name].shape) for name in NAMES}
        for name, indices in rows.items():
            np.add.at(grads[name], indices, value_grads[:, None] * self.score)
        return {**grads, VALUE_HEAD_WEIGHT: (value_grads @ self.states)[None]}

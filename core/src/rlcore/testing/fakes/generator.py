"""A correct generator in numpy: it samples from the tables of `policy`, all running samples at once."""

from typing import Any

import numpy as np
from attrs import frozen

from rlcore.spi import (
    CloseRequest,
    ContractError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    RefitError,
    RefitRequest,
    RefitResult,
    SamplingParams,
    SetResidencyRequest,
    SetResidencyResult,
    hookimpl,
    tensor_digest,
)
from rlcore.spi.arrays import AnyArray, BoolArray, Int32Array, Int64Array
from rlcore.testing.fakes.policy import NAMES, TRANSITION, Float64Array, log_softmax, logits
from rlcore.testing.fakes.residency import count_residency
from rlcore.testing.fakes.tokenizer import FakeTokenizer


@frozen(kw_only=True)
class FakeGeneratorConfig:
    """Options of the fake generator."""

    instant: bool = False
    """Ignore the weights and draw all tokens uniformly at once, every sample as long as it may be. For measuring what
    surrounds the generator; exact where the weights are all zero."""


class FakeGenerator:
    """The generator backend `fake`."""

    def __init__(self, context: GeneratorContext, config: FakeGeneratorConfig) -> None:
        self.config = config
        self.max_sequence_length = context.max_sequence_length
        self.weights: dict[str, AnyArray] = {}
        self.weight_version = -1
        self.tokenizer = FakeTokenizer()
        self.rank_info = context.rank_info

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample responses."""
        if self.weight_version < 0 or request.weight_version != self.weight_version:
            found = f"a request for weight version {request.weight_version}"
            raise ContractError(
                f"generate: found {found}; expected {self.weight_version}, the one held (-1 is none). Refit before"
            )
        prompt_lengths = np.repeat(request.prompts.lengths, request.num_samples)
        limits = np.minimum(request.max_tokens, self.max_sequence_length - prompt_lengths)
        if len(limits) and limits.min() < 1:
            raise ContractError(f"generate: a prompt has no room for a response below {self.max_sequence_length} tokens")
        if self.config.instant:
            return self.sample_instantly(request, limits)
        tokens, logprobs, lengths, reasons = self.sample(request, limits)
        taken = np.arange(tokens.shape[1]) < lengths[:, None]
        if request.on_finished is not None:
            for sample in np.argsort(lengths, kind="stable").tolist():
                part = slice(sample, sample + 1)
                row, own = tokens[sample][taken[sample]].astype(np.int32), logprobs[sample][taken[sample]]
                request.on_finished(sample, self.result(row, lengths[part], own, reasons[part]))
        return self.result(tokens[taken].astype(np.int32), lengths, logprobs[taken], reasons)

    @hookimpl
    def refit(self, request: RefitRequest) -> RefitResult:
        """Take over weights; those held before stay until all new ones are here and checked."""
        expected = {spec.name: spec for spec in request.weights.specs}
        if set(expected) != set(NAMES):
            raise RefitError(f"refit: found tensors {sorted(expected)}; expected {sorted(NAMES)}")
        keep = request.may_alias and request.weights.persistent
        received: dict[str, AnyArray] = {}
        for bucket in request.weights.buckets:
            for named in bucket.tensors:
                value: AnyArray = named.tensor if keep else np.array(named.tensor)
                spec = expected.get(named.name)
                if spec is None or named.name in received:
                    raise RefitError(f"refit: {named.name} came again or was not announced")
                if value.shape != spec.shape or value.dtype != np.dtype(spec.dtype):
                    raise RefitError(
                        f"refit: {named.name} is {value.shape} of {value.dtype}; expected {spec.shape} of {spec.dtype}"
                    )
                if tensor_digest(value) != named.digest:
                    raise RefitError(f"refit: {named.name} does not have the digest that was sent with it")
                received[named.name] = value
        if missing := set(expected) - set(received):
            raise RefitError(f"refit: {sorted(missing)} did not come")
        self.take(received, request.weight_version)
        digests = {name: tensor_digest(value) for name, value in received.items()}
        return RefitResult(weight_version=self.weight_version, digests=digests)

    @hookimpl
    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Count the bytes that would be left on the device; there is no cache."""
        if request.discard_weights:
            self.weights, self.weight_version = {}, -1
        return count_residency(
            self.rank_info, request, weight_bytes=sum(value.nbytes for value in self.weights.values()), state_bytes=0
        )

    @hookimpl
    def close(self, request: CloseRequest) -> None:  # noqa: ARG002
        """Free everything."""
        self.weights, self.weight_version = {}, -1

    def take(self, weights: dict[str, AnyArray], weight_version: int) -> None:
        """Hold `weights` from now on."""
        self.weights, self.weight_version = weights, weight_version

    def sample(self, request: GenerateRequest, limits: Int64Array) -> tuple[Int64Array, Float64Array, Int64Array, AnyArray]:
        """Tokens and log-probabilities [S, longest], lengths int64 [S] and finish reasons uint8 [S], token by token."""
        prompts, prompt_of = request.prompts, np.repeat(np.arange(request.prompts.num_sequences), request.num_samples)
        first = prompts.tokens[prompts.offsets[:-1]][prompt_of].astype(np.int64)
        previous = prompts.tokens[prompts.offsets[1:] - 1][prompt_of].astype(np.int64)
        position = prompts.lengths[prompt_of]
        shape = (len(limits), int(limits.max(initial=0)))
        tokens, logprobs = np.zeros(shape, np.int64), np.zeros(shape)
        lengths, reasons = np.zeros(shape[0], np.int64), np.zeros(shape[0], np.uint8)
        running = np.arange(shape[0])
        for step in range(shape[1]):
            values = logits(self.weights, first[running], previous[running], position[running] + step)
            chosen, chosen_logprobs = choose(values, request.sampling, uniforms(request.seeds[running], step))
            tokens[running, step], logprobs[running, step] = chosen, chosen_logprobs
            previous[running], lengths[running] = chosen, step + 1
            stopped = self.stopped(tokens[running, : step + 1], request.sampling)
            ended = stopped | (limits[running] == step + 1)
            reasons[running] = np.where(stopped, FinishReason.STOP, FinishReason.LENGTH)
            running = running[~ended]
        return tokens, logprobs, lengths, reasons

    def sample_instantly(self, request: GenerateRequest, limits: Int64Array) -> GenerateResult:
        """Uniform tokens for every sample up to its limit."""
        vocab_size = len(self.weights[TRANSITION])
        num_tokens = int(limits.sum())
        drawn = np.random.default_rng(request.seeds).integers(0, vocab_size, num_tokens, dtype=np.int32)
        reasons = np.full(len(limits), FinishReason.LENGTH, np.uint8)
        return self.result(drawn, limits, np.full(num_tokens, -np.log(vocab_size)), reasons)

    def result(self, tokens: Int32Array, lengths: Int64Array, logprobs: Float64Array, reasons: AnyArray) -> GenerateResult:
        """The record of packed samples."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return GenerateResult(
            tokens=tokens,
            offsets=offsets,
            logprobs=logprobs.astype(np.float32),
            weight_versions=np.full(len(tokens), self.weight_version, np.int32),
            finish_reasons=reasons,
        )

    def stopped(self, tokens: Int64Array, sampling: SamplingParams) -> BoolArray:
        """bool [S]: which of the samples `tokens` [S, length] the last token ends."""
        stopped = np.isin(tokens[:, -1], sampling.stop_token_ids)
        if sampling.stop_strings:
            texts = (self.tokenizer.decode(row) for row in tokens)
            stopped |= np.array([any(stop in text for stop in sampling.stop_strings) for text in texts], np.bool_)
        return stopped


def choose(values: Float64Array, sampling: SamplingParams, uniform: Float64Array) -> tuple[Int64Array, Float64Array]:
    """Tokens and their log-probabilities, [S] each, from logits [S, V] by inverting the cumulated distribution."""
    rows = np.arange(len(values))
    if sampling.temperature == 0.0:
        best = values.argmax(axis=1)
        return best, log_softmax(values)[rows, best]
    table = log_softmax(truncate(values / sampling.temperature, sampling))
    cumulated = np.exp(table).cumsum(axis=1)
    chosen = (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(axis=1)
    return chosen, table[rows, chosen]


def truncate(values: Float64Array, sampling: SamplingParams) -> Float64Array:
    """Logits [S, V] with -inf outside the k most probable tokens, then outside the smallest set of mass top_p."""
    num_kept = sampling.top_k or values.shape[1]
    if num_kept >= values.shape[1] and sampling.top_p >= 1.0:
        return values
    order = np.argsort(-values, axis=1, kind="stable")
    ranked = np.take_along_axis(values, order, axis=1)
    ranked[:, num_kept:] = -np.inf
    probabilities = np.exp(log_softmax(ranked))
    mass_before = probabilities.cumsum(axis=1) - probabilities
    ranked[mass_before >= sampling.top_p] = -np.inf
    out = np.empty_like(values)
    np.put_along_axis(out, order, ranked, axis=1)
    return out


def uniforms(seeds: Int64Array, step: int) -> Float64Array:
    """float64 [S] in [0, 1): the numbers that the seeds' samples use at a step, by the mixer of SplitMix64 (Steele, 2014)."""
    offset = (step + 1) * 0x9E3779B97F4A7C15 % 2**64
    state: Any = seeds.astype(np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64(offset)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(factor)
    state ^= state >> np.uint64(31)
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)

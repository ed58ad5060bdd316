"""A correct generator in numpy: it samples from the tables of `policy`, a token of all running samples at once."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen

from rlcore import spi
from rlcore.spi.arrays import AnyArray, BoolArray, Int32Array, Int64Array, offsets_of
from rlcore.testing.fakes.policy import (
    NAMES,
    TRANSITION,
    Float64Array,
    adapted,
    adapter_names,
    count_residency,
    log_softmax,
    logits,
    make_weights,
)
from rlcore.testing.fakes.tokenizer import VOCABULARY_SIZE, FakeTokenizer

OWN_SCALE = 1.2
"""Standard deviation of the weights that stand for those of a model."""


@frozen(kw_only=True)
class FakeGeneratorConfig:
    """Options of the fake generator."""

    instant: bool = False
    """Ignore the weights and draw all tokens uniformly at once, every sample as long as it may be. For measuring what
    surrounds the generator; exact where the weights are all zero."""


class FakeGenerator:
    """The generator backend `fake`."""

    def __init__(self, context: spi.GeneratorContext, config: FakeGeneratorConfig) -> None:
        self.config = config
        self.max_sequence_length = context.max_sequence_length
        own: dict[str, AnyArray] = {**make_weights(VOCABULARY_SIZE, 0, OWN_SCALE)} if context.channel is None else {}
        self.lora = context.lora
        self.weights = own
        self.adapted: dict[str, dict[str, AnyArray]] = {}
        """The weights as each adapter changes them; empty without adapters."""
        self.versions = {"": 0} if own else {}
        """The version of each adapter held."""
        self.is_whole = False
        """True where the weights below adapters count."""
        self.changing = threading.RLock()
        """Held while weights and versions change, and while both are looked at."""
        self.tokenizer = FakeTokenizer()
        self.rank_info = context.rank_info

    @spi.hookimpl
    def generate(self, request: spi.GenerateRequest) -> spi.GenerateResult:
        """Sample responses."""
        if request.weight_version != self.versions.get(request.adapter):
            found = f"a request for weight version {request.weight_version} of {request.adapter!r}"
            raise spi.ContractError(f"generate: found {found}; expected of {self.versions}, which are held. Refit before")
        if self.config.instant:
            return self.sample_instantly(request, self.limits(request))
        running = self.begin(request)
        while running.left.size:
            ended = self.step(running)
            if request.on_finished is not None:
                for sample in ended.tolist():
                    request.on_finished(sample, running.result(np.array([sample])))
        return running.result(np.arange(len(request.seeds)))

    @spi.hookimpl
    def stream(self, request: spi.StreamRequest) -> spi.StreamResult:
        """Sample what the feed brings, a token of all samples at a time."""
        feed, number = request.feed, 0
        running: dict[int, RunningSamples] = {}
        while (taken := feed.take(wait=not running)) is not None:
            for one in taken:
                if self.config.instant and len(one.seeds):
                    feed.deliver(number + np.arange(len(one.seeds)), self.sample_instantly(one, self.limits(one)))
                elif len(one.seeds):
                    running[number] = self.begin(one)
                number += len(one.seeds)
            for first, samples in list(running.items()):
                ended = self.step(samples)
                if ended.size:
                    feed.deliver(first + ended, samples.result(ended))
                if not samples.left.size:
                    del running[first]
        for first, samples in running.items():
            feed.deliver(first + samples.left, samples.result(samples.left))
        return spi.StreamResult()

    @spi.hookimpl
    def refit(self, request: spi.RefitRequest) -> spi.RefitResult:
        """Take over weights; those held before stay until all new ones are here and checked."""
        expected = {spec.name: spec for spec in request.weights.specs}
        names = {*(NAMES if request.weights.has_weights else ()), *(adapter_names(self.lora) if self.lora else ())}
        if set(expected) != names:
            raise spi.RefitError(f"refit: found tensors {sorted(expected)}; expected {sorted(names)}")
        was_whole, self.is_whole = self.is_whole, False
        if not (request.weights.has_weights or was_whole):
            raise spi.RefitError("refit: found adapters alone; expected the weights too, of which there are none here")
        keep = request.may_alias and request.weights.persistent
        received: dict[str, AnyArray] = {}
        for bucket in request.weights.buckets:
            for named in bucket.tensors:
                value: AnyArray = named.tensor if keep else np.array(named.tensor)
                spec = expected.get(named.name)
                if spec is None or named.name in received:
                    raise spi.RefitError(f"refit: {named.name} came again or was not announced")
                if value.shape != spec.shape or value.dtype != np.dtype(spec.dtype):
                    raise spi.RefitError(
                        f"refit: {named.name} is {value.shape} of {value.dtype}; expected {spec.shape} of {spec.dtype}"
                    )
                if spi.tensor_digest(value) != named.digest:
                    raise spi.RefitError(f"refit: {named.name} does not have the digest that was sent with it")
                received[named.name] = value
        if missing := set(expected) - set(received):
            raise spi.RefitError(f"refit: {sorted(missing)} did not come")
        with self.changing:
            if request.weights.has_weights:
                self.take({name: received[name] for name in NAMES}, request.weight_version)
            if self.lora is not None:
                self.take_adapter(received, self.lora, request)
        self.is_whole = True
        digests = {name: spi.tensor_digest(value) for name, value in received.items()}
        return spi.RefitResult(weight_version=request.weight_version, digests=digests)

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Count the bytes that would be left on the device; there is no cache."""
        if request.discard_weights:
            self.drop_weights()
        return count_residency(
            self.rank_info, request, weight_bytes=sum(value.nbytes for value in self.weights.values()), state_bytes=0
        )

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:  # noqa: ARG002
        """Free everything."""
        self.drop_weights()

    def take(self, weights: dict[str, AnyArray], weight_version: int) -> None:
        """Hold `weights` from now on."""
        with self.changing:
            self.weights, self.adapted, self.versions = weights, {}, {"": weight_version}

    def take_adapter(self, adapter: Mapping[str, AnyArray], lora: spi.LoraSpec, request: spi.RefitRequest) -> None:
        """Hold an adapter, beside others where it came alone."""
        if request.weights.has_weights:
            self.versions = {}
        self.adapted[request.adapter] = adapted(self.weights, adapter, lora)
        self.versions[request.adapter] = request.weight_version
        for name in request.drops:
            del self.adapted[name], self.versions[name]

    @property
    def weight_version(self) -> int:
        """Return the version of the weights held; -1 where none count."""
        return self.versions.get("", -1)

    def drop_weights(self) -> None:
        """Hold nothing."""
        self.weights, self.adapted, self.versions, self.is_whole = {}, {}, {}, False

    def sampled(self, request: spi.GenerateRequest) -> tuple[Mapping[str, AnyArray], int] | None:
        """The weights of the adapter that a request names, and their version; None where it is not held any more."""
        with self.changing:
            version = self.versions.get(request.adapter)
            return None if version is None else (self.adapted.get(request.adapter, self.weights), version)

    def limits(self, request: spi.GenerateRequest) -> Int64Array:
        """int64 [S]: tokens at which each sample is cut."""
        limits = np.minimum(
            request.max_tokens, self.max_sequence_length - np.repeat(request.prompts.lengths, request.num_samples)
        )
        if len(limits) and limits.min() < 1:
            raise spi.ContractError(f"generate: a prompt has no room for a response below {self.max_sequence_length} tokens")
        return limits

    def begin(self, request: spi.GenerateRequest) -> "RunningSamples":
        """The samples of a request before their first token."""
        return RunningSamples(request, self.limits(request))

    def step(self, samples: "RunningSamples") -> Int64Array:
        """Draw one more token of each sample that has not ended; int64 [M]: those that it ends."""
        running, request = samples.left, samples.request
        sampled = self.sampled(request)
        if sampled is None:
            samples.left = running[:0]
            return running
        weights, version = sampled
        values = logits(weights, samples.first[running], samples.previous[running], samples.position[running])
        chosen, chosen_logprobs = choose(values, request.sampling, uniforms(request.seeds[running], samples.num_steps))
        if request.sampling_mask:
            for sample, row in zip(running.tolist(), kept_tokens(values, request.sampling), strict=True):
                samples.kept[sample].append(row)
        samples.tokens[running, samples.num_steps] = chosen
        samples.logprobs[running, samples.num_steps] = chosen_logprobs
        samples.versions[running, samples.num_steps] = version
        samples.previous[running] = chosen
        samples.position[running] += 1
        samples.lengths[running] += 1
        samples.num_steps += 1
        stopped = self.stopped(samples.tokens[running, : samples.num_steps], request.sampling)
        ended = stopped | (samples.limits[running] == samples.num_steps)
        samples.reasons[running[ended]] = np.where(stopped[ended], spi.FinishReason.STOP, spi.FinishReason.LENGTH)
        samples.left = running[~ended]
        done: Int64Array = running[ended]
        return done

    def sample_instantly(self, request: spi.GenerateRequest, limits: Int64Array) -> spi.GenerateResult:
        """Uniform tokens for every sample up to its limit."""
        vocab_size = len(self.weights[TRANSITION])
        num_tokens = int(limits.sum())
        drawn = np.random.default_rng(request.seeds).integers(0, vocab_size, num_tokens, dtype=np.int32)
        reasons = np.full(len(limits), spi.FinishReason.LENGTH, np.uint8)
        return spi.GenerateResult(
            tokens=drawn,
            offsets=offsets_of(limits),
            logprobs=np.full(num_tokens, -np.log(vocab_size), np.float32),
            weight_versions=np.full(num_tokens, self.versions[request.adapter], np.int32),
            finish_reasons=reasons,
            sampling_mask=spi.SamplingMask.whole(num_tokens) if request.sampling_mask else None,
        )

    def stopped(self, tokens: Int32Array, sampling: spi.SamplingParams) -> BoolArray:
        """bool [M]: which of the samples `tokens` [M, length] the last token ends."""
        stopped = np.isin(tokens[:, -1], sampling.stop_token_ids)
        if sampling.stop_strings:
            texts = (self.tokenizer.decode(row) for row in tokens)
            stopped |= np.array([any(stop in text for stop in sampling.stop_strings) for text in texts], np.bool_)
        return stopped


class RunningSamples:
    """The S samples of one request while they are made."""

    def __init__(self, request: spi.GenerateRequest, limits: Int64Array) -> None:
        prompts, prompt_of = request.prompts, np.repeat(np.arange(request.prompts.num_sequences), request.num_samples)
        shape = (len(limits), int(limits.max(initial=0)))
        self.request = request
        self.limits = limits
        self.first = prompts.tokens[prompts.offsets[:-1]][prompt_of].astype(np.int64)
        """int64 [S]: the first token of each sample's prompt; `previous` is its last token so far."""
        self.previous = prompts.tokens[prompts.offsets[1:] - 1][prompt_of].astype(np.int64)
        self.position = prompts.lengths[prompt_of]
        self.num_steps = 0
        """Tokens of those that have not ended."""
        self.lengths = np.zeros(shape[0], np.int64)
        self.tokens = np.zeros(shape, np.int32)
        self.logprobs = np.zeros(shape, np.float32)
        self.versions = np.zeros(shape, np.int32)
        self.reasons = np.full(shape[0], spi.FinishReason.ABORTED, np.uint8)
        self.kept: list[list[Int32Array]] = [[] for _ in range(shape[0])]
        """The kept tokens of each sample's tokens, where the request asks for them."""
        self.left = np.arange(shape[0])
        """int64 [M]: those that have not ended."""

    def result(self, samples: Int64Array) -> spi.GenerateResult:
        """The record of some of them."""
        lengths = self.lengths[samples]
        taken = np.arange(self.tokens.shape[1]) < lengths[:, None]
        return spi.GenerateResult(
            tokens=self.tokens[samples][taken],
            offsets=offsets_of(lengths),
            logprobs=self.logprobs[samples][taken],
            weight_versions=self.versions[samples][taken],
            finish_reasons=self.reasons[samples],
            sampling_mask=self.sampling_mask(samples) if self.request.sampling_mask else None,
        )

    def sampling_mask(self, samples: Int64Array) -> spi.SamplingMask:
        """Return the tokens that those of some samples were chosen among."""
        return spi.SamplingMask.of([row for sample in samples.tolist() for row in self.kept[sample]])


def kept_tokens(values: Float64Array, sampling: spi.SamplingParams) -> list[Int32Array]:
    """Return the tokens among which `choose` chooses each token, from logits [S, V]; nothing where that is everything."""
    truncates = sampling.temperature > 0 and (sampling.top_k or sampling.top_p < 1)
    cut = truncate(values / sampling.temperature, sampling) if truncates else np.full_like(values, -np.inf)
    return [np.flatnonzero(row).astype(np.int32) for row in np.isfinite(cut)]


def choose(values: Float64Array, sampling: spi.SamplingParams, uniform: Float64Array) -> tuple[Int64Array, Float64Array]:
    """Tokens and their log-probabilities, [S] each, from logits [S, V] by inverting the cumulated distribution."""
    rows = np.arange(len(values))
    if sampling.temperature == 0.0:
        best = values.argmax(axis=1)
        return best, log_softmax(values)[rows, best]
    table = log_softmax(truncate(values / sampling.temperature, sampling))
    cumulated = np.exp(table).cumsum(axis=1)
    chosen = (cumulated <= uniform[:, None] * cumulated[:, -1:]).sum(axis=1)
    return chosen, table[rows, chosen]


def truncate(values: Float64Array, sampling: spi.SamplingParams) -> Float64Array:
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

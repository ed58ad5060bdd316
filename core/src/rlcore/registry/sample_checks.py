"""Check a generator's samples, their lengths, ends, weight versions and ranges, also as a stream's feed takes them."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, evolve, frozen

from rlcore.registry.checks import TOLERANCE
from rlcore.spi.arrays import AnyArray, BoolArray, Int32Array, Int64Array, check_array, check_range
from rlcore.spi.errors import ContractError, DataError, RlcoreError
from rlcore.spi.generator import FinishReason, GenerateRequest, GenerateResult, SampleFeed, SamplingParams


@frozen(kw_only=True, eq=False)
class ExpectedSamples:
    """The properties that S samples should have."""

    prompt_lengths: Int64Array
    """int64 [S]"""
    max_tokens: Int32Array
    """int32 [S]"""
    sampling: SamplingParams
    routed_experts: bool
    sampling_mask: bool
    adapter: str = ""

    @classmethod
    def of(cls, request: GenerateRequest) -> "ExpectedSamples":
        """Return the properties that a request asks for."""
        return cls(
            prompt_lengths=np.repeat(request.prompts.lengths, request.num_samples),
            max_tokens=request.max_tokens,
            sampling=request.sampling,
            routed_experts=request.routed_experts,
            sampling_mask=request.sampling_mask,
            adapter=request.adapter,
        )

    def select(self, samples: Int64Array) -> "ExpectedSamples":
        """Select samples by their numbers, int64 [M]."""
        return evolve(self, prompt_lengths=self.prompt_lengths[samples], max_tokens=self.max_tokens[samples])


def check_samples(
    expected: ExpectedSamples,
    result: GenerateResult,
    newest_version: int,
    max_sequence_length: int,
    vocab_size: int | None = None,
) -> None:
    """Raise ContractError for the first fault of a generator's result.

    `newest_version` is the newest weight version that a token can have. `vocab_size` is the model's, where its files state it.
    """
    check_range("logprobs", result.logprobs, upper=TOLERANCE)
    result.check_tokens("tokens")
    check_sampled(result.largest_token(), vocab_size)
    check_range("weight_versions", result.weight_versions, lower=0, upper=newest_version)
    _check_spans(result)
    _check_lengths(expected, result, max_sequence_length)
    _check_routed(expected, result)
    _check_mask(expected, result)
    if expected.sampling.stop_token_ids:
        _check_stops(expected.sampling, result)


def check_vocabulary(where: str, largest_token: int, vocab_size: int | None) -> None:
    """Raise DataError where prompts or rows hold a token that the model does not have."""
    if vocab_size is not None and largest_token >= vocab_size:
        cause = "Its tokenizer is of another model or adds tokens, or the environment gives tokens of its own"
        raise DataError(f"found the token {largest_token} in {where}; expected {_vocabulary(vocab_size)}. {cause}")


def check_sampled(largest_token: int, vocab_size: int | None) -> None:
    """Raise ContractError where the generator sampled a token that the model does not have."""
    if vocab_size is not None and largest_token >= vocab_size:
        raise ContractError(f"tokens: the generator sampled {largest_token}; expected {_vocabulary(vocab_size)}")


def _vocabulary(vocab_size: int) -> str:
    return f"tokens below {vocab_size}, the model's vocabulary (vocab_size in its config.json)"


def _check_spans(result: GenerateResult) -> None:
    """Require that later tokens of a sample come from the same weights or newer ones."""
    falls = np.flatnonzero(result.weight_versions[1:] < result.weight_versions[:-1]) + 1
    within = falls[~np.isin(falls, result.offsets)]
    if len(within):
        position = int(within[0])
        sample = int(np.searchsorted(result.offsets, position, side="right")) - 1
        found = f"{result.weight_versions[position - 1]} before {result.weight_versions[position]}"
        raise ContractError(f"weight_versions: found {found} in sample {sample}; expected versions that never fall")


def _check_lengths(expected: ExpectedSamples, result: GenerateResult, max_sequence_length: int) -> None:
    """Check the number of samples, their lengths, and that finish reasons agree with the lengths."""
    reasons = result.finish_reasons
    if len(reasons) != len(expected.max_tokens):
        raise ContractError(f"found {len(reasons)} samples; expected {len(expected.max_tokens)}")
    lengths = np.diff(result.offsets)
    limits = np.minimum(expected.max_tokens, max_sequence_length - expected.prompt_lengths)
    _refuse(reasons > max(FinishReason), "finish_reasons", reasons, "a FinishReason")
    _refuse(lengths > limits, "sample lengths", lengths, "at most max_tokens, and the prompt with it within the sequence limit")
    _refuse((lengths == 0) & (reasons != FinishReason.ABORTED), "sample lengths", lengths, "at least 1 unless aborted")
    short = (reasons == FinishReason.LENGTH) & (lengths < limits)
    _refuse(short, "sample lengths", lengths, "the whole limit, since its finish reason is LENGTH")


def _check_routed(expected: ExpectedSamples, result: GenerateResult) -> None:
    """Rows for the tokens of every prompt and response where they were asked for, and for none otherwise."""
    routed = result.routed_experts
    if (routed is not None) != expected.routed_experts:
        found, wanted = ("None", "experts") if routed is None else ("experts", "None, since they were not asked for")
        raise ContractError(f"routed_experts: found {found}; expected {wanted}")
    if routed is not None:
        expected_lengths = expected.prompt_lengths + np.diff(result.offsets)
        lengths = np.diff(routed.offsets)
        if len(lengths) != len(expected_lengths):
            raise ContractError(f"routed_experts: found {len(lengths)} samples; expected {len(expected_lengths)}")
        _refuse(lengths != expected_lengths, "routed_experts", lengths, "a row for each token of prompt and response")
        lowest = int(routed.experts.min(initial=0))
        if lowest < -1:
            raise ContractError(f"routed_experts: found the expert {lowest}; expected -1 where none is known")


def _check_mask(expected: ExpectedSamples, result: GenerateResult) -> None:
    """Rows that hold their token, where they were asked for, and none at temperature 0."""
    mask, sampling = result.sampling_mask, expected.sampling
    if (mask is not None) != expected.sampling_mask:
        found, wanted = ("None", "a mask") if mask is None else ("a mask", "None, since it was not asked for")
        raise ContractError(f"sampling_mask: found {found}; expected {wanted}")
    if mask is not None:
        mask.check(result.tokens)
        if sampling.temperature == 0.0 and len(mask.tokens):
            raise ContractError("sampling_mask: found kept tokens at temperature 0; expected empty rows")


def _check_stops(sampling: SamplingParams, result: GenerateResult) -> None:
    """A stop token ends its sample, whose finish reason is then STOP; without stop strings nothing else is STOP."""
    is_stop = result.is_any_of(sampling.stop_token_ids)
    present = np.diff(result.offsets) > 0
    last = result.offsets[1:][present] - 1
    ends_with_stop = np.zeros(len(present), np.bool_)
    ends_with_stop[present] = is_stop[last]
    is_stop[last] = False
    if is_stop.any():
        position = int(is_stop.argmax())
        sample = int(np.searchsorted(result.offsets, position, side="right")) - 1
        raise ContractError(f"tokens: sample {sample} goes on after the stop token {result.tokens[position]}; expected its end")
    stopped = result.finish_reasons == FinishReason.STOP
    _refuse(ends_with_stop & ~stopped, "finish_reasons", result.finish_reasons, "STOP, since its last token is a stop token")
    if not sampling.stop_strings:
        expected = "a stop token at the end, or another reason than STOP"
        _refuse(stopped & ~ends_with_stop, "finish_reasons", result.finish_reasons, expected)


def _refuse(wrong: BoolArray, name: str, values: AnyArray, expected: str) -> None:
    """Raise ContractError for the first sample where `wrong` bool [S] is True."""
    if wrong.any():
        sample = int(wrong.argmax())
        raise ContractError(f"{name}: found {values[sample]} at sample {sample}; expected {expected}")


@define(eq=False)
class _Taken:
    """A request that the generator has taken, until all its samples are delivered."""

    first: int
    """The number of its first sample in the stream."""
    expected: ExpectedSamples
    missing: BoolArray
    """bool [S]: which samples were not delivered yet."""


class CheckedFeed:
    """Between a generator and the feed that it was given. The first thing that is wrong ends the stream; nothing is raised in
    the generator's own threads, where an error might be lost. Once it is closed, nothing reaches the feed: an engine that was
    given up may still deliver, when the feed already serves another stream, whose samples have the same numbers."""

    def __init__(
        self,
        feed: SampleFeed,
        require: Callable[[GenerateRequest], None],
        check: Callable[[ExpectedSamples, GenerateResult], None],
    ) -> None:
        """`require` raises where a request is not legal, `check` where samples are not what they were to be."""
        self._feed = feed
        self._require = require
        self._check = check
        self._lock = threading.RLock()
        """Held while samples are delivered, so that none are on their way once `close` returns."""
        self._taken: list[_Taken] = []
        """Ascending by number."""
        self._num_samples = 0
        self._has_ended = False
        self._is_closed = False
        self._error: BaseException | None = None

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """Return the next requests of the generator; see SampleFeed."""
        try:
            requests = None if self._error is not None else self._feed.take(wait=wait)
        except BaseException as error:
            self._fail(error)
            raise
        if requests is None:
            self._has_ended = True
            return None
        with self._lock:
            try:
                for request in requests:
                    self._require(request)
                for request in requests:
                    self._expect(request)
            except RlcoreError as error:
                self._fail(error)
                return None
        return requests

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        """Pass on finished samples; see SampleFeed."""
        with self._lock:
            if self._is_closed or self._error is not None:
                return
            try:
                try:
                    taken = self._claim(samples)
                    if not isinstance(result, GenerateResult):
                        raise ContractError(f"found {type(result).__name__}; expected a GenerateResult")
                    self._check(taken.expected.select(samples - taken.first), result)
                except ContractError as error:
                    raise ContractError(f"delivered what it must not: {error}") from None
                self._feed.deliver(samples, result)
            except BaseException as error:  # the generator's thread would lose it
                self._fail(error)

    def end(self) -> None:
        """End the stream."""
        with self._lock:
            if not self._is_closed:
                self._feed.end()

    def close(self) -> None:
        """Let nothing through any more. Returns once no sample is being delivered."""
        with self._lock:
            self._is_closed = True

    def finish(self) -> None:
        """Raise what was wrong; ContractError where samples were never delivered, or the generator did not wait for the end."""
        if self._error is not None:
            raise self._error
        if not self._has_ended:
            raise ContractError("returned before the feed had ended; expected it to go on until `take` returns None")
        if self._taken:
            number = self._taken[0].first + int(self._taken[0].missing.argmax())
            left = sum(int(one.missing.sum()) for one in self._taken)
            raise ContractError(f"returned without sample {number}, one of {left} never delivered; expected them as ABORTED")

    def _expect(self, request: GenerateRequest) -> None:
        num_samples = len(request.seeds)
        if num_samples:
            self._taken.append(_Taken(self._num_samples, ExpectedSamples.of(request), np.ones(num_samples, np.bool_)))
        self._num_samples += num_samples

    def _claim(self, samples: Int64Array) -> _Taken:
        """The request of some samples, which are delivered now."""
        check_array("samples", samples, np.int64)
        if not len(samples):
            raise ContractError("found no samples; expected at least one")
        position = bisect_right(self._taken, int(samples[0]), key=lambda one: one.first) - 1
        taken = self._taken[position] if position >= 0 else None
        if taken is None or samples.min() < taken.first or samples.max() >= taken.first + len(taken.missing):
            raise ContractError(f"found samples {samples[:8].tolist()}; expected those of one request, not delivered before")
        positions = samples - taken.first
        if len(np.unique(positions)) < len(positions) or not taken.missing[positions].all():
            raise ContractError(f"found samples {samples[:8].tolist()}, one of them for the second time")
        taken.missing[positions] = False
        if not taken.missing.any():
            del self._taken[position]
        return taken

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error
        self._feed.end()

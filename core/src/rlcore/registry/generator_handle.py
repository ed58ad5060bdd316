"""The typed handle of a generator."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from attrs import evolve

from rlcore.registry.checks import TOLERANCE, check_int, check_range, compare_digests, recorded_export
from rlcore.registry.discovery import Entry
from rlcore.registry.handle import BackendHandle
from rlcore.registry.hooks import CallRecord
from rlcore.spi import capabilities
from rlcore.spi.arrays import AnyArray, BoolArray
from rlcore.spi.errors import ContractError, RefitError, WorkerError
from rlcore.spi.generator import FinishReason, GenerateRequest, GenerateResult, RefitRequest, RefitResult
from rlcore.spi.lifecycle import SetResidencyRequest, SetResidencyResult


class GeneratorHandle(BackendHandle):
    """A generator, bound. It answers `generate` only while the last refit was accepted."""

    least_loaded_version: ClassVar[int] = -1

    def __init__(self, entry: Entry, hooks: Any, record: CallRecord, max_sequence_length: int) -> None:
        super().__init__(entry, hooks, record)
        self._max_sequence_length = max_sequence_length
        self._lock = threading.Lock()
        self._num_generating = 0
        self._newest_version = -1

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample responses at the version that the last refit brought."""
        self._require_legal("generate", request, GenerateRequest)
        if self._state.weight_version is None:
            raise ContractError(f"{self.entry.label}: generate without an accepted refit; it holds no weights that count")
        self._state.require_version("generate", request.weight_version)
        self._require_sampling(request)
        with self._generating():
            try:
                return self._call("generate", request, GenerateResult, lambda result: self._check_samples(request, result))
            except WorkerError:
                self._state.weight_version = None
                raise

    def refit(self, request: RefitRequest) -> RefitResult:
        """Bring the generator to an export's weights. RefitError, naming the tensors, where it does not hold them after."""
        self._require_legal("refit", request, RefitRequest)
        needed = {f"refit.{request.channel}": True, capabilities.IN_FLIGHT_REFIT: self._num_generating > 0}
        self._require_capabilities("refit", needed)
        if request.weights.weight_version != request.weight_version:
            found = f"{request.weights.weight_version}, the request {request.weight_version}"
            raise ContractError(f"{self.entry.label}: refit: the export has weight version {found}")
        sent: dict[str, int] = {}
        watched = evolve(request, weights=recorded_export(request.weights, sent))
        self._state.weight_version = None
        # What is generated meanwhile may carry the new version, and end, before the backend has answered.
        self._newest_version = max(self._newest_version, request.weight_version)
        result = self._call("refit", watched, RefitResult, lambda result: _check_refit(request, sent, result))
        self._state.weight_version = self._newest_version = result.weight_version
        return result

    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move what the generator holds; with `discard_weights` it holds none that count until the next refit."""
        discards = isinstance(request, SetResidencyRequest) and request.discard_weights
        self._require_capabilities("set_residency", {capabilities.DISCARD_WEIGHTS: discards})
        result = super().set_residency(request)
        if request.discard_weights:
            self._state.weight_version = None
        return result

    @contextmanager
    def _generating(self) -> Iterator[None]:
        with self._lock:
            self._num_generating += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_generating -= 1

    def _loaded(self, weight_version: int) -> None:
        """A loaded state cannot vouch for weights: only those that a refit brought, and that are still held, count."""
        if weight_version != self._state.weight_version:
            self._state.weight_version = None

    def _require_sampling(self, request: GenerateRequest) -> None:
        longest = int(request.prompts.lengths.max(initial=0))
        if longest >= self._max_sequence_length:
            limit = f"a prompt has {longest} tokens; expected fewer than max_sequence_length = {self._max_sequence_length}"
            raise ContractError(f"{self.entry.label}: generate: {limit}")
        needed = {
            capabilities.TOP_K: request.sampling.top_k != 0,
            capabilities.TOP_P: request.sampling.top_p < 1,
            capabilities.STOP_STRINGS: bool(request.sampling.stop_strings),
            capabilities.STREAMING: request.on_finished is not None,
            capabilities.ROUTED_EXPERTS: request.routed_experts,
        }
        self._require_capabilities("generate", needed)

    def _check_samples(self, request: GenerateRequest, result: GenerateResult) -> None:
        check_range("logprobs", result.logprobs, upper=TOLERANCE)
        check_range("tokens", result.tokens, lower=0)
        # A refit in flight brings versions after the request's; without one, a result of older weights is no error here.
        newest = max(self._newest_version, request.weight_version)
        check_range("weight_versions", result.weight_versions, lower=0, upper=newest)
        _check_spans(result)
        _check_lengths(request, result, self._max_sequence_length)
        _check_routed(request, result)
        if request.sampling.stop_token_ids:
            _check_stops(request, result)


def _check_spans(result: GenerateResult) -> None:
    """Require that later tokens of a sample come from the same weights or newer ones."""
    falls = np.flatnonzero(np.diff(result.weight_versions) < 0) + 1
    within = falls[~np.isin(falls, result.offsets)]
    if len(within):
        position = int(within[0])
        sample = int(np.searchsorted(result.offsets, position, side="right")) - 1
        found = f"{result.weight_versions[position - 1]} before {result.weight_versions[position]}"
        raise ContractError(f"weight_versions: found {found} in sample {sample}; expected versions that never fall")


def _check_refit(request: RefitRequest, sent: dict[str, int], result: RefitResult) -> None:
    if check_int("weight_version", result.weight_version, at_least=0) != request.weight_version:
        raise RefitError(f"weight_version: found {result.weight_version}; expected {request.weight_version}")
    compare_digests(request.weights.specs, sent, result.digests)


def _check_lengths(request: GenerateRequest, result: GenerateResult, max_sequence_length: int) -> None:
    """How many samples, how long each is, and whether the finish reason agrees with that."""
    reasons = result.finish_reasons
    expected = len(request.max_tokens)
    if len(reasons) != expected:
        raise ContractError(f"found {len(reasons)} samples; expected {expected}")
    lengths = np.diff(result.offsets)
    room = max_sequence_length - np.repeat(request.prompts.lengths, request.num_samples)
    limits = np.minimum(request.max_tokens, room)
    _refuse(reasons > max(FinishReason), "finish_reasons", reasons, "a FinishReason")
    _refuse(lengths > limits, "sample lengths", lengths, "at most max_tokens, and the prompt with it within the sequence limit")
    _refuse((lengths == 0) & (reasons != FinishReason.ABORTED), "sample lengths", lengths, "at least 1 unless aborted")
    short = (reasons == FinishReason.LENGTH) & (lengths < limits)
    _refuse(short, "sample lengths", lengths, "the whole limit, since its finish reason is LENGTH")


def _check_routed(request: GenerateRequest, result: GenerateResult) -> None:
    """Rows for the tokens of every prompt and response where they were asked for, and for none otherwise."""
    routed = result.routed_experts
    if (routed is not None) != request.routed_experts:
        found, expected = ("None", "experts") if routed is None else ("experts", "None, since they were not asked for")
        raise ContractError(f"routed_experts: found {found}; expected {expected}")
    if routed is not None:
        expected_lengths = np.repeat(request.prompts.lengths, request.num_samples) + np.diff(result.offsets)
        lengths = np.diff(routed.offsets)
        if len(lengths) != len(expected_lengths):
            raise ContractError(f"routed_experts: found {len(lengths)} samples; expected {len(expected_lengths)}")
        _refuse(lengths != expected_lengths, "routed_experts", lengths, "a row for each token of prompt and response")
        lowest = int(routed.experts.min(initial=0))
        if lowest < -1:
            raise ContractError(f"routed_experts: found the expert {lowest}; expected -1 where none is known")


def _check_stops(request: GenerateRequest, result: GenerateResult) -> None:
    """A stop token ends its sample, whose finish reason is then STOP; without stop strings nothing else is STOP."""
    is_stop = np.zeros(len(result.tokens), np.bool_)
    for token in request.sampling.stop_token_ids:
        is_stop |= result.tokens == token
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
    if not request.sampling.stop_strings:
        expected = "a stop token at the end, or another reason than STOP"
        _refuse(stopped & ~ends_with_stop, "finish_reasons", result.finish_reasons, expected)


def _refuse(wrong: BoolArray, name: str, values: AnyArray, expected: str) -> None:
    """Raise ContractError for the first sample where `wrong` bool [S] is True."""
    if wrong.any():
        sample = int(wrong.argmax())
        raise ContractError(f"{name}: found {values[sample]} at sample {sample}; expected {expected}")

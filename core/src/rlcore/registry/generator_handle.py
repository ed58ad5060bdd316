"""The typed handle of a generator."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from attrs import evolve

from rlcore.registry.checks import check_int, check_record, compare_digests, recorded_export
from rlcore.registry.discovery import Entry
from rlcore.registry.handle import BackendHandle
from rlcore.registry.hooks import CallRecord
from rlcore.registry.sample_checks import CheckedFeed, ExpectedSamples, check_samples, check_vocabulary
from rlcore.spi import capabilities
from rlcore.spi.channels import installed_channels
from rlcore.spi.errors import ContractError, RefitError, WorkerError
from rlcore.spi.generator import (
    DraftCounts,
    GenerateRequest,
    GenerateResult,
    RefitRequest,
    RefitResult,
    StreamRequest,
    StreamResult,
)
from rlcore.spi.lifecycle import SetResidencyRequest, SetResidencyResult

OWN_VERSION = 0
"""The version of the weights that a generator reads itself."""


class GeneratorHandle(BackendHandle):
    """A generator, bound. It answers `generate` only while the last refit was accepted."""

    least_loaded_version: ClassVar[int] = -1

    def __init__(
        self,
        entry: Entry,
        hooks: Any,
        record: CallRecord,
        max_sequence_length: int,
        *,
        own_weights: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        """Wrap a generator. With `own_weights` it has its model's weights as version 0. `vocab_size`: None where unknown."""
        super().__init__(entry, hooks, record)
        self._max_sequence_length = max_sequence_length
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._num_generating = 0
        self._newest_version = -1
        if own_weights:
            self._require_capabilities("begin without a trainer's weights", {capabilities.OWN_WEIGHTS: True})
            self._state.weight_version = self._newest_version = OWN_VERSION

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample responses at the version that the last refit brought."""
        self._require_legal("generate", request, GenerateRequest)
        self._require_weights("generate", request.weight_version)
        self._require_sampling("generate", request)
        # A refit in flight brings versions after the request's; without one, a result of older weights is no error here.
        with self._generating():
            return self._call(
                "generate", request, GenerateResult, lambda result: self._check(ExpectedSamples.of(request), result)
            )

    def stream(self, request: StreamRequest) -> StreamResult:
        """Generate what a feed brings, until it ends; refits in flight bring newer versions meanwhile."""
        self._require_legal("stream", request, StreamRequest)
        self._require_capabilities("stream", {capabilities.CONTINUOUS: True})
        self._require_weights("stream", request.weight_version)
        feed = CheckedFeed(request.feed, self._require_streamed, self._check)
        with self._generating():
            try:
                result = self._call("stream", evolve(request, feed=feed), StreamResult)
            finally:
                feed.close()
        try:
            feed.finish()
        except ContractError as error:
            raise ContractError(f"{self.entry.label}: stream {error}") from error
        return result

    def refit(self, request: RefitRequest) -> RefitResult:
        """Bring the generator to an export's weights. RefitError, naming the tensors, where it does not hold them after."""
        self._require_legal("refit", request, RefitRequest)
        channel, provider = installed_channels().get(request.channel), self.entry.provider
        needed = {
            f"refit.{request.channel}": channel is None or provider is None or not channel.fits(provider.capabilities),
            capabilities.IN_FLIGHT_REFIT: self._num_generating > 0,
            capabilities.DELTA_REFIT: request.delta != "off",
        }
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
        if not result.is_starting:
            self._state.weight_version = self._newest_version = result.weight_version
        return result

    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move what the generator holds; with `discard_weights` it holds no weights that count until the next refit. Nor does
        it after a WorkerError; then it is where it was to be once it has been started anew."""
        discards = isinstance(request, SetResidencyRequest) and request.discard_weights
        self._require_capabilities("set_residency", {capabilities.DISCARD_WEIGHTS: discards})
        if self._num_generating:
            raise ContractError(f"{self.entry.label}: set_residency while it generates; let generate and stream return first")
        try:
            result = super().set_residency(request)
        except WorkerError:
            if self.is_usable and isinstance(self._record.error, WorkerError):
                self._state.weights, self._state.state, self._state.weight_version = request.weights, request.state, None
            raise
        if request.discard_weights:
            self._state.weight_version = None
        return result

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Count the call; a worker that died in it leaves no weights that count."""
        with self._lock:
            self._num_generating += 1
        try:
            yield
        except WorkerError:
            self._state.weight_version = None
            raise
        finally:
            with self._lock:
                self._num_generating -= 1

    def _require_weights(self, hook: str, weight_version: int) -> None:
        if self._state.weight_version is None:
            raise ContractError(f"{self.entry.label}: {hook} without an accepted refit; it holds no weights that count")
        self._state.require_version(hook, weight_version)

    def _require_streamed(self, request: GenerateRequest) -> None:
        if not isinstance(request, GenerateRequest):
            raise ContractError(f"took a {type(request).__name__}; expected a GenerateRequest")
        if request.on_finished is not None or request.weight_version > self._newest_version:
            found = f"on_finished {request.on_finished!r:.40} and weight version {request.weight_version}"
            raise ContractError(f"took a request with {found}; expected None and at most {self._newest_version}")
        self._require_sampling("stream", request)

    def _harmless(self, hook: str, error: BaseException) -> bool:
        return super()._harmless(hook, error) or (hook == "set_residency" and isinstance(error, WorkerError))

    def _loaded(self, weight_version: int) -> None:
        """A loaded state cannot vouch for weights: only those that a refit brought, and that are still held, count."""
        if weight_version != self._state.weight_version:
            self._state.weight_version = None

    def _require_sampling(self, hook: str, request: GenerateRequest) -> None:
        longest = int(request.prompts.lengths.max(initial=0))
        if longest >= self._max_sequence_length:
            limit = f"a prompt has {longest} tokens; expected fewer than max_sequence_length = {self._max_sequence_length}"
            raise ContractError(f"{self.entry.label}: {hook}: {limit}")
        check_vocabulary("a prompt", request.prompts.largest_token(), self._vocab_size)
        needed = {
            capabilities.TOP_K: request.sampling.top_k != 0,
            capabilities.TOP_P: request.sampling.top_p < 1,
            capabilities.STOP_STRINGS: bool(request.sampling.stop_strings),
            capabilities.STREAMING: request.on_finished is not None,
            capabilities.ROUTED_EXPERTS: request.routed_experts,
            capabilities.SAMPLING_MASK: request.sampling_mask,
            capabilities.IMAGES: request.images is not None,
        }
        self._require_capabilities(hook, needed)

    def _check(self, expected: ExpectedSamples, result: GenerateResult) -> None:
        check_samples(expected, result, self._newest_version, self._max_sequence_length, self._vocab_size)


def _check_refit(request: RefitRequest, sent: dict[str, int], result: RefitResult) -> None:
    if check_int("weight_version", result.weight_version, at_least=0) != request.weight_version:
        raise RefitError(f"weight_version: found {result.weight_version}; expected {request.weight_version}")
    if result.is_starting:
        if request.waits:
            raise RefitError("is_starting: found True; expected the weights to be held, since the request waits")
    elif request.weights.shards is None:
        compare_digests(request.weights.specs, sent, result.digests)
    elif request.weights.shards.route is None:
        raise RefitError("found no route to the generator's ranks in a sharded export; expected one, and nothing was sent")
    elif check_int("shard_digest", result.shard_digest, at_least=0) >= 2**64:
        raise RefitError(f"shard_digest: found {result.shard_digest}; expected 64 bits")
    if result.drafts is not None:
        drafts = check_record(result.drafts, DraftCounts)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            check_int(f"drafts.{name}", getattr(drafts, name), at_least=0)

"""The typed handle of a generator."""

import threading
from collections.abc import Collection, Iterator
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
    """A generator, bound. It answers `generate` only while the last refit was accepted, and of adapters that it holds."""

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
        max_adapters: int = 1,
    ) -> None:
        """Wrap a generator. With `own_weights` it has its model's weights as version 0. `vocab_size`: None where unknown."""
        super().__init__(entry, hooks, record)
        self._max_sequence_length = max_sequence_length
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._max_adapters = max_adapters
        self._num_generating = 0
        self._versions: dict[str, int] = {}
        """The version held of each adapter, the last that came at the end; "" is the model's where there are no others."""
        self._newest: dict[str, int] = {}
        """The newest version that a token of each adapter may carry, also of one that is dropped while it is sampled."""
        self._streamed: Collection[str] = ()
        """Adapters that requests of a stream may name, also while a refit is under way."""
        self._require_capabilities("build", {capabilities.MANY_ADAPTERS: max_adapters > 1})
        if own_weights:
            self._require_capabilities("begin without a trainer's weights", {capabilities.OWN_WEIGHTS: True})
            self._hold({"": OWN_VERSION})

    @property
    def weight_version(self) -> int | None:
        """The version that came last; None while no weights count."""
        return next(reversed(self._versions.values()), None)

    def version_of(self, adapter: str) -> int | None:
        """Return the version held of an adapter; None where it is not held."""
        return self._versions.get(adapter)

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample responses at the version that the last refit brought."""
        self._require_legal("generate", request, GenerateRequest)
        self._require_weights("generate", request.weight_version, request.adapter)
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
            capabilities.MANY_ADAPTERS: request.adapter != "" or bool(request.drops),
        }
        self._require_capabilities("refit", needed)
        others = self._others(request)
        if request.weights.weight_version != request.weight_version:
            found = f"{request.weights.weight_version}, the request {request.weight_version}"
            raise ContractError(f"{self.entry.label}: refit: the export has weight version {found}")
        sent: dict[str, int] = {}
        watched = evolve(request, weights=recorded_export(request.weights, sent))
        self._versions = {}
        # What is generated meanwhile may carry the new version, and end, before the backend has answered.
        newest = max(self._newest.get(request.adapter, -1), request.weight_version)
        self._newest, self._streamed = {**self._newest, request.adapter: newest}, {*self._streamed, request.adapter}
        result = self._call("refit", watched, RefitResult, lambda result: _check_refit(request, sent, result))
        if not result.is_starting:
            self._hold({**others, request.adapter: result.weight_version})
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
                self._state.weights, self._state.state, self._versions = request.weights, request.state, {}
            raise
        if request.discard_weights:
            self._versions = {}
        return result

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Count the call; a worker that died in it leaves no weights that count."""
        with self._lock:
            self._num_generating += 1
        try:
            yield
        except WorkerError:
            self._versions = {}
            raise
        finally:
            with self._lock:
                self._num_generating -= 1

    def _others(self, request: RefitRequest) -> dict[str, int]:
        """The adapters, with their versions, that stay beside the one that a refit brings. ContractError where it drops what is
        not held, or too many would be."""
        unknown = [repr(name) for name in request.drops if name not in self._versions or name == request.adapter]
        if unknown:
            found = f"{', '.join(unknown)} in drops; expected of {self._held_text()}, others than {request.adapter!r}"
            raise ContractError(f"{self.entry.label}: refit: found {found}")
        if request.weights.has_weights:
            return {}
        others = {name: held for name, held in self._versions.items() if name not in (request.adapter, *request.drops)}
        if len(others) >= self._max_adapters:
            most = f"at most max_adapters = {self._max_adapters} with it. Drop others by the request's drops"
            raise ContractError(
                f"{self.entry.label}: refit: found {self._held_text()} beside {request.adapter!r}; expected {most}"
            )
        return others

    def _hold(self, versions: dict[str, int]) -> None:
        self._versions, self._newest, self._streamed = versions, self._newest | versions, versions.keys()

    def _held_text(self) -> str:
        named = ", ".join(f"{name!r} of version {held}" for name, held in self._versions.items())
        return f"the adapters {named}" if named else "no adapters"

    def _require_weights(self, hook: str, weight_version: int, adapter: str | None = None) -> None:
        """ContractError unless this version of an adapter is held; None is any."""
        if not self._versions:
            raise ContractError(f"{self.entry.label}: {hook} without an accepted refit; it holds no weights that count")
        if adapter is not None and adapter not in self._versions:
            raise ContractError(f"{self.entry.label}: {hook} with the adapter {adapter!r}; it holds {self._held_text()}")
        held = [version for name, version in self._versions.items() if adapter in (None, name)]
        if weight_version not in held:
            holds = held[0] if len(self._versions) == 1 else self._held_text()
            raise ContractError(f"{self.entry.label}: {hook} at weight version {weight_version}; it holds {holds}")

    def _require_streamed(self, request: GenerateRequest) -> None:
        if not isinstance(request, GenerateRequest):
            raise ContractError(f"took a {type(request).__name__}; expected a GenerateRequest")
        if request.adapter not in self._streamed:
            raise ContractError(f"took a request of the adapter {request.adapter!r}; expected one of {sorted(self._streamed)}")
        newest = self._newest[request.adapter]
        if request.on_finished is not None or request.weight_version > newest:
            found = f"on_finished {request.on_finished!r:.40} and weight version {request.weight_version}"
            raise ContractError(f"took a request with {found}; expected None and at most {newest}")
        self._require_sampling("stream", request)

    def _harmless(self, hook: str, error: BaseException) -> bool:
        return super()._harmless(hook, error) or (hook == "set_residency" and isinstance(error, WorkerError))

    def _loaded(self, weight_version: int) -> None:
        """A loaded state cannot vouch for weights: only those that a refit brought, and that are still held, count."""
        if weight_version != self.weight_version:
            self._versions = {}

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
            capabilities.STRUCTURED_OUTPUT: request.sampling.json_schema is not None,
            capabilities.STREAMING: request.on_finished is not None,
            capabilities.TOKEN_STREAMING: request.readers is not None,
            capabilities.PROMPT_LOGPROBS: any(one is not None and one.on_prompt is not None for one in request.readers or ()),
            capabilities.ROUTED_EXPERTS: request.routed_experts,
            capabilities.SAMPLING_MASK: request.sampling_mask,
            capabilities.IMAGES: request.images is not None,
        }
        self._require_capabilities(hook, needed)

    def _check(self, expected: ExpectedSamples, result: GenerateResult) -> None:
        newest = self._newest[expected.adapter]
        check_samples(expected, result, newest, self._max_sequence_length, self._vocab_size)


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

"""The generator's hooks. The core calls them only where they are legal, so what is open and resident is not checked again."""

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeAlias

from attrs import evolve

from rlcore import spi
from rlcore.spi.arrays import Int64Array
from rlcore_torchkit.generation import FinishedSample, check_sampling, sample_limits
from rlcore_torchkit.huggingface.safetensors_files import check_hub_files
from rlcore_vllm.channels.manifest import AdapterPlace
from rlcore_vllm.engines.routing import require_experts
from rlcore_vllm.engines.sampling import SMALLEST_TEMPERATURE, joined
from rlcore_vllm.engines.versions import NO_ADAPTER
from rlcore_vllm.refit.followers import Followers
from rlcore_vllm.refit.held_adapters import HeldAdapters
from rlcore_vllm.refit.transfer import Transfer
from rlcore_vllm.replicas.background_restart import BackgroundRestart, Restart
from rlcore_vllm.replicas.device_placement import DevicePlacement
from rlcore_vllm.replicas.process import ProcessReplica
from rlcore_vllm.replicas.readers import cut_when_cancelled, hand_to_reader
from rlcore_vllm.replicas.replica import LocalReplica, Replica
from rlcore_vllm.replicas.request_dispatch import dispatch
from rlcore_vllm.replicas.stream import Stream
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.settings import EngineSettings, engine_settings, replica_devices, vocab_size, with_devices

OWN_WEIGHTS = HeldAdapters(numbers={"": NO_ADAPTER}, versions={NO_ADAPTER: 0})
"""The adapters held once the engines have read weights themselves."""
NOT_HELD = -1
"""A number that no adapter has."""

Finished: TypeAlias = "queue.SimpleQueue[Sequence[FinishedSample] | Future[None]]"


class VllmBackend:
    """Generates with one or several vLLM engines, and the weights of a trainer or the model's own."""

    def __init__(self, context: spi.GeneratorContext, config: VllmConfig) -> None:
        config = with_devices(config, context.devices)
        self._context = context
        self._config = config
        self._held = HeldAdapters()
        """The versions that count in all engines; none while they hold no weights."""
        self._changing = threading.Lock()
        """Held while the engines are refitted or restarted, and while a request is handed to them."""
        self._vocab_size = vocab_size(context.model)
        if context.channel is None:
            check_hub_files(context.model)
        self._followers = Followers(config)
        self._replicas = make_replicas(context, config)
        self._placement = DevicePlacement(self._replicas)
        self._num_starts = [1] * len(self._replicas)
        self._in_background = BackgroundRestart(self._changing)
        try:
            _start(self._replicas, methodcaller("start"))
            self._transfer = self._make_transfer()
            if context.channel is None:
                self._begin_with_own_weights()
        except BaseException:
            _in_parallel(replica.close for replica in self._replicas)
            raise

    @spi.hookimpl
    def generate(self, request: spi.GenerateRequest) -> spi.GenerateResult:
        """Sample responses. Several calls may be under way, and refits go on beside them."""
        limits = self._limits(request)
        finished: Finished = queue.SimpleQueue()
        with self._changing:
            # So that it begins before a refit or after it, with the version that was checked.
            self._held.require(request.weight_version, request.adapter)
            number = self._held.numbers[request.adapter]
            parts = dispatch(request, limits, [0] * len(self._replicas), adapter=number)
            num_starts = list(self._num_starts)
            on_tokens = partial(hand_to_reader, request)
            calls = [
                replica.generate(part, finished.put, on_tokens) for replica, part in zip(self._replicas, parts, strict=True)
            ]
        for replica, part, call in zip(self._replicas, parts, calls, strict=True):
            cut_when_cancelled(request, part, replica, call)
        try:
            for call in calls:
                call.add_done_callback(finished.put)
            return joined(_gather(len(calls), finished, request), request)
        except BaseException:
            self._abandon({call: engine for engine, call in enumerate(calls)}, num_starts)
            raise

    @spi.hookimpl
    def stream(self, request: spi.StreamRequest) -> spi.StreamResult:
        """Sample what the feed brings, as it comes. Other calls may be under way, and refits go on beside it."""
        feed = request.feed
        stream = Stream(self._replicas, feed)
        with self._changing:
            self._held.require_any(request.weight_version)
            num_starts = list(self._num_starts)
        try:
            while (taken := feed.take(wait=True)) is not None:
                for one in taken:
                    limits = self._limits(one)
                    with self._changing:
                        if self._num_starts != num_starts:
                            raise spi.WorkerError("stream: the engines were started anew while it ran. Refit, and stream again")
                        # One that was dropped since the feed gave it has no number, and its samples end at once.
                        stream.add(one, limits, self._held.numbers.get(one.adapter, NOT_HELD))
            stream.cut()
        except BaseException:
            self._abandon(stream.calls, num_starts)
            raise
        return spi.StreamResult()

    @spi.hookimpl
    def refit(self, request: spi.RefitRequest) -> spi.RefitResult:
        """Take over weights, also while generate runs. After a failure there are none, until a refit succeeds."""
        channel = self._context.channel
        if request.channel != channel:
            raise spi.ContractError(
                f"refit: found channel {request.channel}; expected {channel}, which the engines were built for"
            )
        if not request.waits and self._in_background.is_under_way:
            return spi.RefitResult(weight_version=request.weight_version, digests={}, is_starting=True)
        with self._changing:
            held, self._held = self._held, HeldAdapters()
            if not (held or request.weights.has_weights):
                raise spi.RefitError(
                    "refit: found adapters alone; expected the model's weights too, of which there are none here"
                )
            place = held.place(request, of_adapters=self._context.lora is not None)
            after = held.after(request, place)
            try:
                _await(replica.begin_update() for replica in self._replicas)
                digests, shard_digest = self._brought(request, place, holds_weights=bool(held))
                drafts = _await(replica.end_update(after.versions) for replica in self._replicas)
            except BaseException:
                # What a half-loaded model computes cannot be told from right results.
                self._claimed(range(len(self._replicas)))()
                raise
            self._held = after
            self._followers.push()
        counted = [one for one in drafts if one is not None]
        guessed = sum(counted, spi.DraftCounts()) if counted else None
        return spi.RefitResult(
            weight_version=request.weight_version,
            digests=digests,
            drafts=guessed,
            shard_digest=shard_digest,
            sent_bytes=None if shard_digest is not None else self._transfer.sent_bytes,
        )

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Put the engines to sleep or wake them, wholly or in part. The KV cache is not kept; weights are, unless discarded.
        Engines that are starting are not waited for, and one that fails is started anew."""
        weights, cache = request.weights == "device", request.state == "device"
        if request.discard_weights and not weights:
            self._held = HeldAdapters()
        num_starts = list(self._num_starts)
        moves = self._placement.move(weights=weights, cache=cache, discard_weights=request.discard_weights)
        self._start_anew({one for one, move in moves.items() if isinstance(move.exception(), spi.WorkerError)}, num_starts)
        return spi.SetResidencyResult(device_bytes=sum(move.result() for move in moves.values()))

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:
        """End the engines and their processes."""
        del request
        # Also where no restart is under way: one may begin until all are ended.
        for replica in self._replicas:
            replica.give_up()
        self._in_background.end()
        self._held = HeldAdapters()
        self._transfer.close()
        self._followers.close()
        _in_parallel(replica.close for replica in self._replicas)

    def held_digests(self, adapter: str | None = None) -> list[dict[str, int]]:
        """The digest of each tensor that an engine's rank computes with, rank by rank; nothing may be generating. With the name
        of an adapter they are those of its slots, else of the model's own tensors."""
        content = {"adapter": NO_ADAPTER if adapter is None else self._held.numbers[adapter]}
        answers = _await(replica.call_workers("rlcore_held_digests", content) for replica in self._replicas)
        return [digests for ranks in answers for digests in ranks]

    def _limits(self, request: spi.GenerateRequest) -> Int64Array:
        """int64 [S]: tokens at which each sample is cut. ContractError for a request that the engines were not built for."""
        if request.routed_experts and not self._context.routed_experts:
            raise spi.ContractError(
                "generate: found routed_experts asked of engines that were built without; expected it in the context"
            )
        check_sampling(request.sampling, SMALLEST_TEMPERATURE)
        return sample_limits(request, self._context.max_sequence_length, self._vocab_size)

    def _abandon(self, calls: Mapping[Future[None], int], num_starts: Sequence[int]) -> None:
        """Leave nothing running of calls, by their engines' numbers, that were interrupted or failed."""
        for call in list(calls):
            call.cancel()
        self._start_anew({engine for call, engine in list(calls.items()) if _has_failed(call)}, num_starts)

    def _start_anew(self, failed: Collection[int], num_starts: Sequence[int]) -> None:
        """Start failed engines anew, unless another call did; in the background, but for one in this very process."""

        def claim() -> Restart:
            return self._claimed(sorted(engine for engine in failed if self._num_starts[engine] == num_starts[engine]))

        if any(self._replicas[engine].is_local for engine in failed):
            with self._changing:
                claim()()
        elif failed:
            self._in_background.begin(claim)

    def _begin_with_own_weights(self) -> None:
        """Count what the engines have read themselves as the first version."""
        _await(replica.begin_update() for replica in self._replicas)
        _await(replica.end_update(OWN_WEIGHTS.versions) for replica in self._replicas)
        self._held = OWN_WEIGHTS

    def _brought(
        self, request: spi.RefitRequest, place: AdapterPlace, *, holds_weights: bool
    ) -> tuple[dict[str, int], int | None]:
        """The digests of each tensor, or of all parts together. `holds_weights`: whether the engines hold those before."""
        weights = request.weights
        if weights.shards is None:
            return self._transfer.send(self._followers.tee(weights), request.delta, place), None
        return {}, self._transfer.take_shards(weights, weights.shards, holds_weights=holds_weights, place=place)

    def _make_transfer(self) -> Transfer:
        return Transfer(channel=self._context.channel, replicas=self._replicas, context=self._context, config=self._config)

    def _claimed(self, indices: Sequence[int]) -> Restart:
        """Return the call that starts engines anew. From now on no move reaches them, and no weights of the generator count
        until the next refit, which reaches all of them."""
        if indices:
            self._held = HeldAdapters()
            if self._context.channel is not None:
                # Before they are counted: a call that knows the new numbers must not find these engines dead.
                self._placement.leave(indices)
                for index in indices:
                    self._num_starts[index] += 1
        return partial(self._restart, indices)

    def _restart(self, indices: Sequence[int]) -> None:
        if not indices:
            return
        if self._context.channel is None:
            self._transfer.close()
            return  # nobody would refit them: what they serve ends
        replicas = [self._replicas[index] for index in indices]
        # Weights of a drafter are to be kept: no refit brings them.
        with self._placement.starting(indices, discard_weights=not self._config.has_drafter):
            # Also where they do not start, nothing is sent by one that is closed.
            closed, self._transfer = self._transfer, self._make_transfer()
            closed.close()
            _start(replicas, methodcaller("restart"))


def make_replicas(context: spi.GeneratorContext, config: VllmConfig) -> list[Replica]:
    """The engines, not started yet. ContractError where this process would have to hold more than one."""
    settings = engine_settings(context, config)
    settings_of = partial(_with_metrics, settings, context.log_directory if config.metrics else None)
    devices = (
        replica_devices(config, context.rank_info.local_rank) if context.rank_info.device == "cuda" else [()] * config.replicas
    )
    if not settings.in_process:
        return [
            ProcessReplica(f"vllm-{index}", settings_of(f"vllm-{index}"), places, config, context.log_directory)
            for index, places in enumerate(devices)
        ]
    if config.replicas > 1 or config.tensor_parallel > 1:
        raise spi.ContractError(
            f"refit.channel: found {context.channel} with replicas = {config.replicas} and tensor_parallel = "
            f"{config.tensor_parallel}; expected 1 of both. Choose another channel"
        )
    if devices[0] not in ((), (0,)):
        raise spi.ContractError(
            f"refit.channel: found {context.channel} on CUDA device {devices[0][0]}; expected device 0, which vLLM takes "
            "in a process. Set CUDA_VISIBLE_DEVICES, or choose another channel"
        )
    return [LocalReplica("vllm-0", settings_of("vllm-0"), devices[0])]


def _with_metrics(settings: EngineSettings, logs: Path | None, name: str) -> EngineSettings:
    """The settings of the engine of this name, whose metrics are kept beside its log."""
    if logs is None:
        return settings
    logs.mkdir(parents=True, exist_ok=True)
    arguments = {**settings.arguments, "disable_log_stats": False}
    return evolve(settings, metrics_file=logs.absolute() / f"{name}.prom", arguments=arguments)


def _gather(num_calls: int, finished: Finished, request: spi.GenerateRequest) -> list[FinishedSample]:
    """All samples, each handed to on_finished as it comes; raises what a call raised."""
    gathered: list[FinishedSample] = []
    while num_calls:
        item = finished.get()
        if isinstance(item, Future):
            item.result()
            num_calls -= 1
            continue
        require_experts(item)
        gathered += item
        if request.on_finished is not None:
            for sample in item:
                request.on_finished(sample.number, joined([sample], request))
    return gathered


def _has_failed(call: Future[None]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is not None


def _start(replicas: Sequence[Replica], start: Callable[[Replica], None]) -> None:
    """Start engines at the same time, but those of one device one after another: vLLM would count the other's memory as its
    own."""
    waves: list[list[Replica]] = []
    for replica in replicas:
        wave = next((wave for wave in waves if not any({*replica.devices} & {*other.devices} for other in wave)), None)
        if wave is None:
            waves.append([replica])
        else:
            wave.append(replica)
    for wave in waves:
        _in_parallel(partial(start, replica) for replica in wave)


def _await(futures: Iterable[Future[Any]]) -> list[Any]:
    """The results of calls that are all made before the first is waited for."""
    return [future.result() for future in list(futures)]


def _in_parallel(calls: Iterable[Callable[[], None]]) -> None:
    """Make calls at the same time; once all have returned, raise what the first that failed raised."""
    calls = list(calls)
    with ThreadPoolExecutor(max_workers=max(1, len(calls))) as pool:
        _await(pool.submit(call) for call in calls)

"""The sending side of a refit: every bucket to every rank of every replica, and their acknowledgements."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlcore import spi
from rlcore.spi.weights import ITEM_BYTES
from rlcore_torchkit.refit.arrivals import refuse
from rlcore_vllm.channels import make_sender
from rlcore_vllm.channels.manifest import NO_PLACE, AdapterPlace, Manifest
from rlcore_vllm.channels.shards import Route, meeting_host
from rlcore_vllm.replicas.replica import Replica
from rlcore_vllm.setup.config import VllmConfig

_ABANDON_TIMEOUT_S = 10.0
_POLL_S = 0.05
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
GRACE_S = 2.0
"""Seconds by which this gives up later than a replica that watches itself, whose own error holds its last lines."""


class Transfer:
    """Sends weights over one channel, again and again. What it needs of the replicas is `call_workers` alone."""

    def __init__(
        self, *, channel: str | None, replicas: Sequence[Replica], context: spi.GeneratorContext, config: VllmConfig
    ) -> None:
        """`channel` is None where the engines have read weights themselves, and nothing is sent."""
        self._channel = channel
        self._replicas = replicas
        self._dtype, self._lora = context.model.dtype, context.lora
        self._config = config
        self._receivers = Receivers(replicas, config.refit_timeout_s)
        self._sender: spi.ChannelSender | None = None
        self._route: Route | None = None
        self._rendezvous = context.rank_info.rendezvous
        self.sent_bytes: int | None = None
        """Bytes that the last `send` took; None where the channel does not count them."""

    def send(self, export: spi.WeightExport, delta: spi.Delta = "off", place: AdapterPlace = NO_PLACE) -> dict[str, int]:
        """Load the export into every engine, its adapter at this place. Returns the digests that every rank of every replica
        has acknowledged.

        RefitError, naming tensors, where one is missing, unknown, repeated, of another shape or changed on the way; WorkerError
        where a replica died or did not answer in time. After either the engines hold a mixture: they have to be restarted, or
        refitted completely.
        """
        self._check_dtypes(export)
        buckets, device = _first_device(export.buckets)
        try:
            sender = self._connected(device)
            claimed = self._send(sender, Manifest.of(export, self._lora, place), buckets, delta)
            return self._acknowledged(export.weight_version, place, claimed)
        except BaseException as error:
            self._abandon(isinstance(error, spi.WorkerError))
            raise
        finally:
            if self._sender is not None:
                self._sender.end()

    def take_shards(
        self, export: spi.WeightExport, shards: spi.ShardExport, *, holds_weights: bool, place: AdapterPlace = NO_PLACE
    ) -> int:
        """Have every rank of every replica take a sharded export, while this process reads it to its end.

        `holds_weights` says whether all hold the version that they have taken last. Returns the sum mod 2^64 of the digests of
        what they took. Errors as of `send`.
        """
        self._check_dtypes(export)
        try:
            if self._route is None:
                ranks = self._receivers.ranks()
                self._route = Route(ranks, meeting_host(ranks, self._rendezvous), self._config.refit_timeout_s)
                options = [{"channel": self._channel, "options": each} for each in self._route.options(shards)]
                self._receivers.start("connect", options).wait()
            self._receivers.start_all("begin", Manifest.of(export, self._lora, place).to_wire()).wait()
            told = self._receivers.start_all("needs", {}).wait()
            route = self._route.to(export.specs, [answer["needs"] for ranks in told for answer in ranks])
            layout = self._route.layout(export.specs, shards)
            pending = self._receivers.start_all("shards", {"layout": layout, "holds_weights": holds_weights})
            shards.route = route
            try:
                for _ in export.buckets:
                    raise spi.RefitError("refit: found a bucket beside shards; expected none")
            except spi.RlcoreError:
                pending.wait()  # where a receiver failed first, it says why
                raise
            pending.wait()
            return self._taken(export.weight_version, place)
        except BaseException as error:
            self._abandon(isinstance(error, spi.WorkerError))
            raise

    def close(self) -> None:
        """Free buffers, communicators and folders."""
        self._route = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def _check_dtypes(self, export: spi.WeightExport) -> None:
        for spec in export.specs:
            if spec.dtype != self._dtype and not spec.keeps_dtype:
                raise spi.RefitError(
                    f"refit: {spec.name} is exported in {spec.dtype}; expected {self._dtype}, the engines' own"
                )

    def _connected(self, device: torch.device) -> spi.ChannelSender:
        """The sender, made and made known to the receivers before the first refit, and again after one that failed."""
        if self._sender is None:
            assert self._channel is not None
            self._sender = make_sender(self._channel, self._config, device)
            options = self._sender.connect(self._receivers.ranks())
            pending = self._receivers.start("connect", [{"channel": self._channel, "options": each} for each in options])
            self._sender.join()
            pending.wait(self._sender.check)
        return self._sender

    def _send(
        self, sender: spi.ChannelSender, manifest: Manifest, buckets: Iterable[spi.WeightBucket], delta: spi.Delta
    ) -> dict[str, int]:
        """Every bucket, loaded everywhere; returns the digests that the trainer named."""
        self._receivers.start_all("begin", manifest.to_wire()).wait()
        sender.begin(manifest.specs, persistent=manifest.persistent, delta=delta)
        specs = {spec.name: spec for spec in manifest.specs}
        claimed: dict[str, int] = {}
        under_way: tuple[int, Pending] | None = None
        for index, bucket in enumerate(buckets):
            names = [named.name for named in bucket.tensors]
            digests = [named.digest for named in bucket.tensors]
            # This goes on while the receivers load the bucket before.
            where = sender.put(index, _checked_tensors(bucket, specs))
            self._take_answer(sender, under_way)
            # Only now: a replica need not carry out calls in the order in which they were made.
            under_way = index, self._receivers.start_all("bucket", {"names": names, "digests": digests, "where": where})
            if sender.num_slots == 1:
                # The bucket is what the receivers read from, and the trainer's next one would overwrite it.
                self._take_answer(sender, under_way)
                under_way = None
            claimed |= zip(names, digests, strict=True)
        self._take_answer(sender, under_way)
        self.sent_bytes = sender.sent_bytes
        return claimed

    def _take_answer(self, sender: spi.ChannelSender, under_way: "tuple[int, Pending] | None") -> None:
        if under_way is not None:
            index, pending = under_way
            pending.wait(sender.check)
            sender.acknowledged(index)

    def _acknowledged(self, weight_version: int, place: AdapterPlace, claimed: dict[str, int]) -> dict[str, int]:
        """Return the digests that all ranks hold; RefitError unless that is one version, with the digests that the trainer
        named, beside the adapters that stay."""
        for replica, ranks in zip(self._replicas, self._receivers.start_all("finish", {}).wait(), strict=True):
            for rank, answer in enumerate(ranks):
                by_whom = f"acknowledged by replica {replica.name}, rank {rank}"
                if answer["weight_version"] != weight_version:
                    raise spi.RefitError(f"refit: version {answer['weight_version']} {by_whom}; expected {weight_version}")
                self._require_adapters(answer, weight_version, place, by_whom)
                held = answer["digests"]
                differing = [name for name in claimed.keys() | held.keys() if claimed.get(name) != held.get(name)]
                refuse(f"not as sent, {by_whom}", differing)
        return claimed

    def _require_adapters(self, answer: Mapping[str, Any], weight_version: int, place: AdapterPlace, by_whom: str) -> None:
        """RefitError unless a rank holds each adapter at its version, and no other."""
        expected = {} if self._lora is None else {**place.kept, place.number: weight_version}
        if (held := dict(answer["adapters"])) != expected:
            raise spi.RefitError(f"refit: adapters of versions {held}, by number, {by_whom}; expected {expected}")

    def _taken(self, weight_version: int, place: AdapterPlace) -> int:
        total = 0
        for replica, ranks in zip(self._replicas, self._receivers.start_all("finish", {}).wait(), strict=True):
            for rank, answer in enumerate(ranks):
                by_whom = f"acknowledged by replica {replica.name}, rank {rank}"
                if answer["weight_version"] != weight_version or answer["shard_digest"] is None:
                    found = f"version {answer['weight_version']}, digest {answer['shard_digest']}"
                    raise spi.RefitError(f"refit: {found} {by_whom}")
                self._require_adapters(answer, weight_version, place, by_whom)
                total += answer["shard_digest"]
        return total % 2**64

    def _abandon(self, is_worker_lost: bool) -> None:
        """Tell those that still answer that nothing more comes; the next refit connects anew."""
        with suppress(spi.RlcoreError):
            if not is_worker_lost:
                Receivers(self._replicas, min(_ABANDON_TIMEOUT_S, self._config.refit_timeout_s)).start_all("abandon", {}).wait()
        self.close()


class Receivers:
    """Every rank of every replica; each step of a refit is made on all of them at once."""

    def __init__(self, replicas: Sequence[Replica], timeout_s: float) -> None:
        self._replicas = replicas
        self._timeout_s = timeout_s

    def start(self, step: str, contents: Sequence[Mapping[str, Any]]) -> "Pending":
        """A step with one content a replica, without waiting for it."""
        pairs = zip(self._replicas, contents, strict=True)
        calls = [replica.call_workers("rlcore_refit", {"step": step, "content": content}) for replica, content in pairs]
        return Pending(step, list(self._replicas), calls, self._timeout_s)

    def start_all(self, step: str, content: Mapping[str, Any]) -> "Pending":
        """A step with the same content for all."""
        return self.start(step, [content] * len(self._replicas))

    def ranks(self) -> list[spi.ReceiverRank]:
        """Every rank of every replica, as its worker describes itself."""
        answers = self.start_all("describe", {}).wait()
        return [spi.ReceiverRank(replica=number, **answer) for number, ranks in enumerate(answers) for answer in ranks]


class Pending:
    """A step that is under way."""

    def __init__(self, step: str, replicas: list[Replica], calls: list[Future[list[Any]]], timeout_s: float) -> None:
        self._step = step
        self._replicas = replicas
        self._calls = calls
        self._timeout_s = timeout_s

    def wait(self, check: Callable[[], None] = lambda: None) -> list[list[dict[str, Any]]]:
        """Return the answer of every rank of every replica; `check` is called now and then and may raise.

        RefitError where a rank refused, WorkerError where a replica died or does not answer in time; of several, the first.
        """
        deadline = time.monotonic() + self._timeout_s + GRACE_S
        waiting = dict(zip(self._calls, self._replicas, strict=True))
        while waiting:
            done, _ = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for call in done:
                self._examine(waiting.pop(call), call)
            if waiting:
                check()
                self._check_deadline(deadline, waiting.values())
        return [call.result() for call in self._calls]

    def _examine(self, replica: Replica, call: Future[list[Any]]) -> None:
        try:
            answers = call.result()
        except Exception as error:
            raise spi.WorkerError(f"replica {replica.name} failed in a refit ({self._step}): {error}") from error
        for rank, answer in enumerate(answers):
            if "refused" in answer:
                raise spi.RefitError(f"{answer['refused']} (replica {replica.name}, rank {rank})")
        # Only then: ranks that lose one that refused, and left their group, fail for that reason.
        for rank, answer in enumerate(answers):
            if "failed" in answer:
                raise spi.RefitError(f"refit: {self._step} failed on replica {replica.name}, rank {rank}:\n{answer['failed']}")

    def _check_deadline(self, deadline: float, replicas: Any) -> None:
        if time.monotonic() > deadline:
            names = ", ".join(replica.name for replica in replicas)
            raise spi.WorkerError(
                f"replica {names} did not answer in a refit ({self._step}) within {self._timeout_s:g} s "
                "(generator.vllm.refit_timeout_s)"
            )


def _first_device(buckets: Iterator[spi.WeightBucket]) -> tuple[Iterator[spi.WeightBucket], torch.device]:
    """The buckets, none of them lost, and the device of the first one's tensors."""
    first = next(buckets, None)
    if first is None or not first.tensors:
        raise spi.RefitError("refit: the trainer exported no weights")
    return chain([first], buckets), torch.as_tensor(first.tensors[0].tensor).device


def _checked_tensors(bucket: spi.WeightBucket, specs: dict[str, spi.TensorSpec]) -> list[Tensor]:
    """The bucket's tensors; RefitError unless each is of the shape and dtype that was announced for it."""
    tensors = []
    for named in bucket.tensors:
        if named.name not in specs:
            refuse("in the buckets but not announced", [named.name])
        spec = specs[named.name]
        tensor: Tensor = named.tensor if type(named.tensor) is Tensor else torch.as_tensor(named.tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tensor.shape != spec.shape or tensor.dtype != _DTYPES[spec.dtype]:
            found, announced = f"{list(tensor.shape)} of {tensor.dtype}", f"{list(spec.shape)} of {spec.dtype}"
            raise spi.RefitError(f"refit: {named.name}: found {found}; expected {announced}, as the trainer announced")
        tensors.append(tensor)
    return tensors

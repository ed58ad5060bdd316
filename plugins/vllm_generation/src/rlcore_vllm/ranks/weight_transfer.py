"""The receiving side of a refit, in each rank of an engine: a weight-transfer engine of vLLM's by the name "rlcore".

Order of a refit: start_weight_update, update_weights with the manifest, update_weights with each bucket, finish_weight_update.
Nothing is touched before the manifest has been compared with the model, and no bucket is loaded before its digests have been
compared: that costs one wait for the device a bucket, a few microseconds against the bucket's milliseconds, and a bucket that
changed on the way then cannot have been mixed in.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from rlcore.spi import ChannelReceiver, RefitError, ShardSlice, TensorSpec
from rlcore_torchkit.adapters.lora_targets import is_adapter
from rlcore_torchkit.refit.arrivals import check_digests, check_names, check_specs, refuse
from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_vllm.channels import make_receiver
from rlcore_vllm.channels.manifest import Manifest, expected_adapters, expected_shapes
from rlcore_vllm.channels.shards import Needs
from rlcore_vllm.channels.shards import Receiver as ShardsReceiver
from rlcore_vllm.ranks.adapters import put_adapter, without_adapters
from rlcore_vllm.ranks.loading import Loader

BACKEND = "rlcore"
_COLUMNS = ("names", "shapes", "dtypes", "kept", "lora")
"""Keys of a manifest that are the same in each refit."""


@dataclass
class ConnectInfo(WeightTransferInitInfo):
    """Connection options, sent once, before the first refit."""

    channel: str
    options: dict[str, Any]
    """The options of the channel's Receiver."""


@dataclass
class StepInfo(WeightTransferUpdateInfo):
    """One of the messages of a refit."""

    manifest: dict[str, Any] | None = None
    bucket: dict[str, Any] | None = None
    shards: dict[str, Any] | None = None
    """The layout of a sharded export, whose parts now come, and whether the model holds those that came before."""


class RlcoreWeightTransferEngine(WeightTransferEngine[ConnectInfo, StepInfo]):
    """One rank's receiver."""

    init_info_cls = ConnectInfo
    update_info_cls = StepInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._receiver: ChannelReceiver | None = None
        self.loader: Loader | None = None
        self._expected: dict[str, tuple[int, ...]] | None = None
        self._expected_adapters: dict[str, tuple[int, ...]] | None = None
        self._manifest: Manifest | None = None
        self._adapters: dict[str, Tensor] = {}
        """Copies of A and B that the refit has brought, until they are put in place."""
        self._held_adapters: dict[int, int] = {}
        """The version of each adapter in the model, by its number."""
        self._specs: dict[str, TensorSpec] = {}
        self._known: tuple[list[Any], tuple[TensorSpec, ...]] | None = None
        """The last announcement, as it came, and its specs, once they have been compared with the model."""
        self._digests: dict[str, int] = {}
        self._shard_digest: int | None = None
        self.received_bytes = 0
        """Bytes that the last sharded refit brought this rank."""
        self._told: dict[tuple[TensorSpec, ...], dict[str, list[ShardSlice]]] = {}
        """The parts that this rank has told the sender that it reads."""

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        self._disconnect()
        rank = self.parallel_config.rank
        self._receiver = make_receiver(init_info.channel, self.device, rank, init_info.options)

    def start_weight_update(self) -> None:
        self._manifest, self._shard_digest = None, None
        self._digests = {}

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one message without waiting for the device, as vLLM's own does: channel, digests and finish_weight_update
        wait."""
        self.receive_weights(self.parse_update_info(update_info))

    @torch.no_grad()
    def receive_weights(self, update_info: StepInfo) -> None:
        if update_info.manifest is not None:
            self._begin(update_info.manifest)
        if update_info.bucket is not None:
            self._take(update_info.bucket)
        if update_info.shards is not None:
            self._take_shards(update_info.shards)

    @torch.no_grad()
    def finish_weight_update(self) -> None:
        refuse("missing from the buckets", self._specs.keys() - self._digests.keys())
        if self._announced().has_weights:
            with without_adapters(self.model):
                self._ready_loader().finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._connected().end()

    def needs(self) -> Needs | None:
        """Return the [start, stop] of the parts that this rank reads of each announced tensor; others are read whole. None
        where nothing has changed since it was last asked."""
        specs = self._announced().specs
        found = {} if self.loader is None else self.loader.needs(specs)
        if self._told.get(specs) == found:
            return None
        self._told[specs] = found
        return {name: [[list(box.start), list(box.stop)] for box in boxes] for name, boxes in found.items()}

    @property
    def brings_weights(self) -> bool:
        """Return whether the refit under way brings the model's own weights."""
        manifest = self._announced()
        return manifest.has_weights or manifest.lora is None

    @torch.no_grad()
    def put_adapters_in_place(self) -> None:
        """After finish_weight_update, which in some versions of vLLM takes away those that there are."""
        manifest = self._announced()
        lora, place = manifest.lora, manifest.place
        if lora is None:
            return
        if not place.kept.items() <= self._held_adapters.items():
            raise RefitError(f"refit: found adapters of versions {self._held_adapters}; expected to keep {dict(place.kept)}")
        put_adapter(self.model, place.number, place.kept, self._adapters, lora, self.device.type)
        self._adapters, self._held_adapters = {}, {**place.kept, place.number: manifest.weight_version}

    def acknowledgement(self) -> dict[str, Any]:
        """Version and digests of what this rank has loaded in the refit that is finished, and the versions of its adapters."""
        if self._manifest is None:
            raise RefitError("refit: nothing has been received that could be acknowledged")
        return {
            "weight_version": self._manifest.weight_version,
            "digests": {} if self._shard_digest is not None else self._digests,
            "shard_digest": self._shard_digest,
            "adapters": list(self._held_adapters.items()),
        }

    @torch.no_grad()
    def abandon(self) -> None:
        """End a refit that failed; the next one must be complete, as each is."""
        self._manifest, self._adapters = None, {}
        if self.loader is not None:
            with without_adapters(self.model):
                self.loader.abandon()
        if self._receiver is not None:
            self._receiver.end()

    def shutdown(self) -> None:
        """Let the model go, which is freed next: vLLM's allocator on GPUs takes no other engine while any of it is left."""
        self._disconnect()
        self.loader = None
        self.model = self._default_model = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """vLLM 0.26's name for the sending side: `iterator` is a WeightExport, `trainer_args` {"transfer": Transfer}."""
        trainer_args["transfer"].send(iterator)

    def _disconnect(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._told = {}

    def _connected(self) -> ChannelReceiver:
        if self._receiver is None:
            raise RefitError("refit: update_weights was called before init_weight_transfer_engine")
        return self._receiver

    def _announced(self) -> Manifest:
        if self._manifest is None:
            raise RefitError("refit: weights came before the manifest")
        return self._manifest

    def _ready_loader(self) -> Loader:
        if self.loader is None:
            raise RefitError("refit: weights came that were not announced")
        return self.loader

    def _begin(self, content: Mapping[str, Any]) -> None:
        columns = [content[key] for key in _COLUMNS]
        # Of tens of thousands of tensors that takes longer than to load them, and each refit announces the same.
        specs = self._known[1] if self._known is not None and self._known[0] == columns else None
        manifest = Manifest.from_wire(content, specs)
        has_weights = manifest.has_weights or manifest.lora is None
        if specs is None:
            self._known = None
            self._check(manifest, has_weights)
            self._specs = {spec.name: spec for spec in manifest.specs}
            self._known = columns, manifest.specs
        self._connected().begin(manifest.persistent)
        self._manifest, self._adapters = manifest, {}
        if has_weights:
            with without_adapters(self.model):
                if self.loader is None:
                    self.loader = Loader(self.model, self.model_config, self.device)
                self.loader.begin()

    def _check(self, manifest: Manifest, has_weights: bool) -> None:
        """RefitError unless it is the model's tensors that are announced."""
        model = self.model_config.hf_config, self.model_config.trust_remote_code
        if self._expected is None:
            self._expected = expected_shapes(*model)
        if self._expected_adapters is None and manifest.lora is not None:
            self._expected_adapters = expected_adapters(*model, manifest.lora)
        check_specs(manifest.specs, {**(self._expected if has_weights else {}), **(self._expected_adapters or {})})

    def _take(self, bucket: Mapping[str, Any]) -> None:
        manifest, receiver, names = self._announced(), self._connected(), bucket["names"]
        check_names(names, self._specs, self._digests)
        received = receiver.receive(bucket["where"], [self._specs[name] for name in names])
        digests = dict(zip(names, tensor_digests(received.tensors), strict=True))
        check_digests(digests, dict(zip(names, bucket["digests"], strict=True)))
        self._load(manifest, dict(zip(names, received.tensors, strict=True)), received.stable)
        self._digests |= digests
        receiver.loaded()

    def _take_shards(self, content: dict[str, Any]) -> None:
        """All parts of the version, window by window; the pieces' digests are compared on arrival, and their sum is kept."""
        manifest, receiver = self._announced(), self._connected()
        if not isinstance(receiver, ShardsReceiver):
            raise RefitError("refit: found a sharded export by a channel for whole tensors; expected the channel shards")
        # A layer that vLLM processes after loading needs all that it is made of.
        only_changed = content["holds_weights"] and manifest.lora is None and self._ready_loader().is_direct
        if only_changed:
            self._ready_loader().keep_rest()
        self._shard_digest = receiver.take_shards(
            manifest,
            content["layout"],
            lambda tensors, partial: self._load(manifest, tensors, stable=False, partial=partial),
            only_changed,
        )
        self.received_bytes = receiver.received_bytes
        self._digests = dict.fromkeys(self._specs, 0)

    def _load(self, manifest: Manifest, tensors: dict[str, Tensor], stable: bool, partial: Set[str] = frozenset()) -> None:
        if manifest.lora is not None:
            self._adapters |= {name: tensor.clone() for name, tensor in tensors.items() if is_adapter(name)}
        weights = [(name, tensor) for name, tensor in tensors.items() if name not in self._adapters]
        if weights:
            with without_adapters(self.model):
                self._ready_loader().load(weights, stable, partial)


def register() -> None:
    """Make vLLM find the engine by its name; done once a process."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, RlcoreWeightTransferEngine)

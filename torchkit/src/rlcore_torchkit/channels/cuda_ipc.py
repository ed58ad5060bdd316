"""Memory of one GPU between two processes: the receiver maps the sender's. An engine's rank on another GPU maps it too, and
copies what it gets to its own, over NVLink where there is one.

A persistent export's tensors are mapped where they are, without a copy. Other tensors live only until the next bucket and are
packed into two buffers instead: one handle for a whole bucket, where a handle a tensor would cost more than the copy.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.spi import (
    ChannelOptions,
    ChannelReceiver,
    ChannelSender,
    Delta,
    ReceivedBucket,
    ReceiverRank,
    RefitError,
    TensorSpec,
)
from rlcore_torchkit.channels.packing import num_bytes, pack, packed_bytes, unpack


class _Shared:
    """A storage that receivers map.

    An alias that owns nothing is shared in its place: torch ties a count of references to what it shares, one more each time,
    and would keep the trainer's memory from being freed and moved as residency asks for. It is made without Python's help,
    since torch frees what a dead receiver has not released when the interpreter is gone already.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        alias: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
        self._alias = alias
        self.handle = pickle.dumps(alias._share_cuda_())


class Sender(ChannelSender):
    """Hands out handles; receivers let go of what they have mapped before they acknowledge the refit."""

    num_slots = 2

    def __init__(self, options: ChannelOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._shared: dict[int, _Shared] = {}
        """The storages shared in this refit, by their address."""
        self.buffers: list[Tensor | None] = [None, None]
        self._persistent = False

    def connect(self, ranks: Sequence[ReceiverRank]) -> list[dict[str, Any]]:
        if self.device.type != "cuda":
            raise RefitError(
                'refit: channel cuda_ipc needs a trainer on CUDA; found its weights on the CPU. Set refit.channel = "auto"'
            )
        _refuse_expandable_segments()
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        return [{"uuid": uuid} for _ in {rank.replica for rank in ranks}]

    def begin(self, specs: tuple[TensorSpec, ...], *, persistent: bool, delta: Delta = "off") -> None:  # noqa: ARG002
        self._persistent = persistent

    def put(self, index: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        if self._persistent and all(tensor.is_contiguous() for tensor in tensors):
            where = self._tensors_themselves(tensors)
        else:
            buffer = self._buffer(index % self.num_slots, packed_bytes([tensor.nbytes for tensor in tensors]))
            pack(tensors, buffer)
            where = {"packed": self._handle(buffer)}
        # The receiver's stream knows nothing of this one.
        torch.cuda.current_stream(self.device).synchronize()
        return where

    def end(self) -> None:
        """The buffers go back to the allocator: between refits the memory is the trainer's and the engine's."""
        self._shared.clear()
        self.buffers = [None, None]
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.end()

    def _tensors_themselves(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Handles of the storages by address, and of each tensor the storage's address and its first byte there."""
        addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
        handles = {address: self._handle(tensor) for address, tensor in zip(addresses, tensors, strict=True)}
        return {"handles": handles, "starts": list(zip(addresses, starts, strict=True))}

    def _handle(self, tensor: Tensor) -> bytes:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._shared:
            self._shared[storage.data_ptr()] = _Shared(storage)
        return self._shared[storage.data_ptr()].handle

    def _buffer(self, slot: int, size: int) -> Tensor:
        buffer = self.buffers[slot]
        if buffer is None or len(buffer) < size:
            if buffer is not None:
                del self._shared[buffer.untyped_storage().data_ptr()]
            buffer = self.buffers[slot] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return buffer


class Receiver(ChannelReceiver):
    """Maps each storage once a refit."""

    def __init__(self, device: torch.device, rank: int, options: dict[str, Any]) -> None:
        super().__init__(device, rank, options)
        self._source = index_of(options["uuid"])
        self._mapped: dict[bytes, Tensor] = {}
        self._stable = False

    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> ReceivedBucket:
        self._stable = "packed" not in where
        if self._stable:
            pairs = zip(specs, where["starts"], strict=True)
            tensors = [self._tensor(spec, where["handles"][address], start) for spec, (address, start) in pairs]
            return ReceivedBucket(tensors=[tensor.to(self.device) for tensor in tensors], stable=True)
        buffer = self._map(where["packed"])
        own = buffer.to(self.device)
        return ReceivedBucket(tensors=unpack(own, specs), stable=own is not buffer)

    def loaded(self) -> None:
        if not self._stable:
            torch.cuda.current_stream(self.device).synchronize()

    def end(self) -> None:
        self._mapped.clear()

    def close(self) -> None:
        self.end()

    def _tensor(self, spec: TensorSpec, handle: bytes, start: int) -> Tensor:
        flat = self._map(handle)[start : start + num_bytes(spec)]
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape)

    def _map(self, handle: bytes) -> Tensor:
        if handle not in self._mapped:
            _, *where = pickle.loads(handle)
            # Not through torch.multiprocessing, which remembers storages by address: where the sender's allocator has made a
            # larger buffer of a smaller one's memory, it would return the smaller one.
            storage = torch.UntypedStorage._new_shared_cuda(self._source, *where)
            self._mapped[handle] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return self._mapped[handle]


def index_of(uuid: str) -> int:
    """Return this process's own number of a device, which CUDA_VISIBLE_DEVICES may have changed."""
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in uuids:
        raise RefitError(
            f"refit: channel cuda_ipc needs the trainer's GPU; the engine does not see {uuid}, only {', '.join(uuids)}. "
            'Leave out generator.vllm.devices, or set refit.channel = "nccl"'
        )
    return uuids.index(uuid)


def _refuse_expandable_segments() -> None:
    snapshot = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    if any(segment.get("is_expandable") for segment in snapshot):
        raise RefitError(
            "refit: channel cuda_ipc cannot share memory of expandable segments. Take expandable_segments:True out of "
            "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF"
        )

"""Buckets packed and broadcast between GPUs: the sender is rank 0, and every rank of every replica receives.

Packing, broadcasting and loading overlap over two buffers on each side. NCCL has no time limits of its own: all calls into it
are made by a thread that can be given up, its communicator aborted, when a peer stays away.
"""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import torch
from torch import Tensor

from rlcore.spi import (
    ChannelOptions,
    ChannelReceiver,
    ChannelSender,
    ReceivedBucket,
    ReceiverRank,
    RefitError,
    TensorSpec,
    WorkerError,
)
from rlcore_torchkit.channels.packing import num_bytes, pack, packed_bytes, unpack

_SENDER = 0
_BUSY_WAIT_S = 0.005
"""A bucket takes milliseconds: only after that is waiting worth giving up the processor."""
_NUM_SLOTS = 2


class _Broadcasts:
    """One side's communicator, its stream, and two buffers. Nothing here waits but `wait`."""

    def __init__(self, device: torch.device, rank: int, options: dict[str, Any]) -> None:
        # Multicast over NVLink is left off: where fabric and driver disagree about it, communicators hang.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        self._device = device
        self._rank = rank
        self._options = options
        self._buffers: list[Tensor | None] = [None] * _NUM_SLOTS
        self._stream = torch.cuda.Stream(device)
        self._communicator: Any = None
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._make_calls, name="rlcore-nccl", daemon=True).start()
        self.connected = self._submit(self._connect)

    def broadcast(self, slot: int, size: int, after: torch.cuda.Event | None) -> "Future[torch.cuda.Event]":
        """Broadcast a slot's first `size` bytes once the device has reached `after`; the result is the event of its end."""
        buffer = self.buffer(slot, size)[:size]
        if after is not None:
            self._stream.wait_event(after)

        def call() -> torch.cuda.Event:
            self._communicator.broadcast(buffer, src=_SENDER, stream=self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
            return done

        return self._submit(call)

    def wait(self, started: "Future[torch.cuda.Event]") -> None:
        """Until a broadcast is done; what the current stream does next comes after it. WorkerError where it takes too long."""
        deadline = time.monotonic() + self._options["timeout_s"]
        try:
            done = started.result(timeout=self._options["timeout_s"])
        except TimeoutError:
            self._give_up()
        begin = time.monotonic()
        while not done.query():
            if time.monotonic() > deadline:
                self._give_up()
            time.sleep(0.0005 if time.monotonic() - begin > _BUSY_WAIT_S else 0.0)
        torch.cuda.current_stream(self._device).wait_event(done)

    def buffer(self, slot: int, size: int) -> Tensor:
        """The slot's buffer: uint8 of at least `size` bytes."""
        buffer = self._buffers[slot]
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[slot] = torch.empty(size, dtype=torch.uint8, device=self._device)
            # The memory may have been another tensor's, on the current stream, until just now.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            buffer.record_stream(self._stream)
        return buffer

    def free_buffers(self) -> None:
        self._buffers = [None] * _NUM_SLOTS

    def close(self) -> None:
        """Abort what still runs."""
        self._calls.put(None)
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None
        self.free_buffers()

    def _connect(self) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(
            host=self._options["host"],
            port=self._options["port"],
            rank=self._rank,
            world_size=self._options["world_size"],
            store_timeout=max(1, int(self._options["timeout_s"])),
        )
        communicator = PyNcclCommunicator(group, device=self._device)
        if communicator.disabled:
            raise RefitError("refit: channel nccl found no NCCL library. Install nvidia-nccl, or choose another refit.channel")
        self._communicator = communicator

    def _submit(self, call: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def _make_calls(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            try:
                torch.cuda.set_device(self._device)
                future.set_result(call())
            except BaseException as error:  # raised where the call is waited for
                future.set_exception(error)

    def _give_up(self) -> NoReturn:
        self.close()
        raise WorkerError(
            f"refit: channel nccl: a broadcast took more than {self._options['timeout_s']:g} s; another rank is dead or hangs. "
            "If it only needs longer, raise generator.vllm.refit_timeout_s"
        )


class Sender(ChannelSender):
    """Rank 0 of the communicator, which broadcasts."""

    num_slots = _NUM_SLOTS

    def __init__(self, options: ChannelOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self.group: dict[str, Any] = {}
        """The options of the receivers, but for their ranks."""
        self._broadcasts: _Broadcasts | None = None
        self._started: dict[int, Future[torch.cuda.Event]] = {}

    def connect(self, ranks: Sequence[ReceiverRank]) -> list[dict[str, Any]]:
        """Ranks are dealt out in the order of replicas."""
        if self.device.type != "cuda":
            raise RefitError(
                'refit: channel nccl needs a trainer on CUDA; found its weights on the CPU. Set refit.channel = "auto"'
            )
        refuse_shared_devices(str(torch.cuda.get_device_properties(self.device).uuid), ranks)
        replicas = [rank.replica for rank in ranks]
        self.group = {
            "host": _address(ranks),
            "port": _free_port(),
            "world_size": 1 + len(ranks),
            "timeout_s": self.options.timeout_s,
        }
        return [self.group | {"first_rank": 1 + replicas.index(replica)} for replica in dict.fromkeys(replicas)]

    def join(self) -> None:
        self._broadcasts = _Broadcasts(self.device, _SENDER, self.group)

    def put(self, index: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        broadcasts, slot = self._joined(), index % _NUM_SLOTS
        size = packed_bytes([tensor.nbytes for tensor in tensors])
        pack(tensors, broadcasts.buffer(slot, size))
        packed = torch.cuda.Event()
        packed.record(torch.cuda.current_stream(self.device))
        self._started[index] = broadcasts.broadcast(slot, size, packed)
        return {"slot": slot}

    def check(self) -> None:
        if self._broadcasts is None:
            return
        for future in (self._broadcasts.connected, *self._started.values()):
            if future.done():
                future.result()

    def acknowledged(self, index: int) -> None:
        self._joined().wait(self._started.pop(index))

    def end(self) -> None:
        self._started.clear()
        if self._broadcasts is not None:
            self._broadcasts.free_buffers()

    def close(self) -> None:
        self._started.clear()
        if self._broadcasts is not None:
            self._broadcasts.close()
            self._broadcasts = None

    def _joined(self) -> _Broadcasts:
        if self._broadcasts is None:
            raise RefitError("refit: channel nccl is closed, or was never joined")
        return self._broadcasts


class Receiver(ChannelReceiver):
    """One rank of one replica, which takes part in each broadcast."""

    def __init__(self, device: torch.device, rank: int, options: dict[str, Any]) -> None:
        super().__init__(device, rank, options)
        self._slot = 0
        self._loaded: list[torch.cuda.Event | None] = [None] * _NUM_SLOTS
        self._broadcasts = _Broadcasts(device, options["first_rank"] + rank, options)
        self._broadcasts.connected.result(timeout=options["timeout_s"])

    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> ReceivedBucket:
        """Receive into the buffer from which the bucket before the last was loaded; the last one may still be loading."""
        self._slot = where["slot"]
        size = packed_bytes([num_bytes(spec) for spec in specs])
        self._broadcasts.wait(self._broadcasts.broadcast(self._slot, size, self._loaded[self._slot]))
        return ReceivedBucket(tensors=unpack(self._broadcasts.buffer(self._slot, size), specs), stable=False)

    def loaded(self) -> None:
        event = self._loaded[self._slot] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))

    def end(self) -> None:
        self._loaded = [None] * _NUM_SLOTS
        self._broadcasts.free_buffers()

    def close(self) -> None:
        self._broadcasts.close()


def refuse_shared_devices(sender: str, ranks: Sequence[ReceiverRank]) -> None:
    """NCCL gives each device one rank."""
    uuids = [sender, *(str(rank.uuid) for rank in ranks)]
    twice = sorted({uuid for uuid in uuids if uuids.count(uuid) > 1})
    if twice:
        raise RefitError(
            f"refit: channel nccl needs a GPU for each rank; {', '.join(twice)} has several of trainer and engines. Give the "
            'engines other generator.vllm.devices, or set refit.channel = "cuda_ipc"'
        )


def _address(ranks: Sequence[ReceiverRank]) -> str:
    """The address at which receivers reach this machine; within it the loopback always works."""
    if all(rank.host == socket.gethostname() for rank in ranks):
        return "127.0.0.1"
    from vllm.utils.network_utils import get_ip

    return str(get_ip())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])

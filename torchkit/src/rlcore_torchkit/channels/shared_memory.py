"""Memory that processes on the CPUs of one machine share: one copy in by the sender, none by the receivers.

Segments are anonymous (memfd): they have no name that could outlive a crash, and the size of /dev/shm, 64 MiB in many
containers, does not bound them. Receivers open them through the sender's entry in /proc.
"""

import mmap
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define
from torch import Tensor

from rlcore.spi import ChannelOptions, ChannelReceiver, ChannelSender, ReceivedBucket, ReceiverRank, RefitError, TensorSpec
from rlcore_torchkit.channels.packing import pack, packed_bytes, unpack


@define(eq=False)
class _Segment:
    """One segment of shared memory that is mapped here."""

    descriptor: int
    buffer: Tensor
    """uint8, the whole segment; it keeps the mapping alive."""


class Sender(ChannelSender):
    """Two segments by turns: one is filled while the receivers load from the other. They are kept from refit to refit."""

    num_slots = 2

    def __init__(self, options: ChannelOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self.segments: list[_Segment | None] = [None, None]

    def connect(self, ranks: Sequence[ReceiverRank]) -> list[dict[str, Any]]:
        for rank in ranks:
            if rank.host != socket.gethostname():
                raise RefitError(
                    f"refit: channel shared_memory reaches no other machine (found an engine on {rank.host}). "
                    'Set refit.channel = "directory" and the option refit_directory of the generator'
                )
        return [{"pid": os.getpid()} for _ in {rank.replica for rank in ranks}]

    def put(self, index: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        segment = self._segment(index % self.num_slots, packed_bytes([tensor.nbytes for tensor in tensors]))
        pack(tensors, segment.buffer)
        return {"descriptor": segment.descriptor, "num_bytes": len(segment.buffer)}

    def close(self) -> None:
        for segment in self.segments:
            if segment is not None:
                os.close(segment.descriptor)
        self.segments = [None, None]

    def _segment(self, slot: int, size: int) -> _Segment:
        """The slot's segment, made larger where it has to be; memory is taken only as it is written to."""
        segment = self.segments[slot]
        if segment is None or len(segment.buffer) < size:
            descriptor = os.memfd_create("rlcore-refit") if segment is None else segment.descriptor
            os.ftruncate(descriptor, size)
            segment = self.segments[slot] = _Segment(descriptor, _mapped(descriptor, size))
        return segment


class Receiver(ChannelReceiver):
    """Maps the sender's segments, each once."""

    def __init__(self, device: torch.device, rank: int, options: dict[str, Any]) -> None:
        super().__init__(device, rank, options)
        self._buffers: dict[int, Tensor] = {}

    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> ReceivedBucket:
        return ReceivedBucket(tensors=unpack(self._buffer(where["descriptor"], where["num_bytes"]), specs), stable=False)

    def close(self) -> None:
        self._buffers.clear()

    def _buffer(self, number: int, size: int) -> Tensor:
        buffer = self._buffers.get(number)
        if buffer is None or len(buffer) != size:
            descriptor = os.open(f"/proc/{self.options['pid']}/fd/{number}", os.O_RDWR)
            try:
                buffer = self._buffers[number] = _mapped(descriptor, size)
            finally:
                os.close(descriptor)
        return buffer


def _mapped(descriptor: int, size: int) -> Tensor:
    """uint8 [size]"""
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)

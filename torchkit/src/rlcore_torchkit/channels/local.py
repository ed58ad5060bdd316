"""Runs both ends of a channel in one process, for a generator that lives in the trainer's."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from attrs import evolve

from rlcore.spi import (
    ChannelOptions,
    ChannelProvider,
    ChannelReceiver,
    ChannelSender,
    ReceiverRank,
    WeightBucket,
    WeightExport,
)


class LocalChannel:
    """The sender and the receiver of one channel."""

    def __init__(self, channel: ChannelProvider, device: torch.device, options: ChannelOptions | None = None) -> None:
        """`device` holds the generator's weights."""
        self._channel, self._device, self._options = channel, device, options or ChannelOptions()
        self._ends: tuple[ChannelSender, ChannelReceiver] | None = None

    def received(self, export: WeightExport) -> WeightExport:
        """Return the export as it arrives: the receiver's tensors, valid until the next bucket is taken, with the trainer's
        digests."""
        return evolve(export, buckets=self._buckets(export), persistent=False)

    def close(self) -> None:
        """Free both ends."""
        ends, self._ends = self._ends, None
        for end in ends or ():
            end.close()

    def _buckets(self, export: WeightExport) -> Iterator[WeightBucket]:
        specs, is_over = {spec.name: spec for spec in export.specs}, False
        try:
            for index, bucket in enumerate(export.buckets):
                tensors = [torch.as_tensor(named.tensor).detach() for named in bucket.tensors]
                if self._ends is None:
                    self._ends = self._connected(tensors[0].device if tensors else self._device)
                sender, receiver = self._ends
                if index == 0:
                    sender.begin(export.specs, persistent=export.persistent)
                    receiver.begin(export.persistent)
                where = sender.put(index, tensors)
                received = receiver.receive(where, [specs[named.name] for named in bucket.tensors]).tensors
                pairs = zip(bucket.tensors, received, strict=True)
                yield WeightBucket(tensors=tuple(evolve(named, tensor=tensor) for named, tensor in pairs))
                receiver.loaded()
                sender.acknowledged(index)
            is_over = True
        finally:
            for end in self._ends or ():
                end.end()
            if not is_over:  # the next refit connects anew
                self.close()

    def _connected(self, source: torch.device) -> tuple[ChannelSender, ChannelReceiver]:
        sender = self._channel.make_sender(self._options, source)
        place = ReceiverRank(replica=0, rank=0, pid=os.getpid(), host=socket.gethostname(), device=self._device.type)
        (options,) = sender.connect([place])
        with ThreadPoolExecutor(1) as pool:  # each side may wait for the other
            joined = pool.submit(sender.join)
            receiver = self._channel.make_receiver(self._device, 0, options)
            joined.result()
        return sender, receiver

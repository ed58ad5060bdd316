"""The trainer's tensors themselves, handed over within one process."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.spi import ChannelReceiver, ChannelSender, ReceivedBucket, ReceiverRank, RefitError, TensorSpec


class Sender(ChannelSender):
    """vLLM copies into its own parameters in any case, so nothing is copied on the way and nothing stays aliased."""

    def connect(self, ranks: Sequence[ReceiverRank]) -> list[dict[str, Any]]:
        for rank in ranks:
            if rank.pid != os.getpid():
                raise RefitError(
                    f"refit: channel in_process reaches no engine in another process (found one in process {rank.pid}). "
                    'Set refit.channel = "auto"'
                )
        return [{} for _ in {rank.replica for rank in ranks}]

    def put(self, index: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        del index
        if self.device.type == "cuda":
            # The engine's thread has a stream of its own, which knows nothing of this one.
            torch.cuda.current_stream(self.device).synchronize()
        return {"tensors": list(tensors)}


class Receiver(ChannelReceiver):
    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> ReceivedBucket:
        del specs
        return ReceivedBucket(tensors=where["tensors"], stable=self.persistent)

    def loaded(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

"""What the two sides of a channel do; a method with nothing but a docstring may be left as it is.

The sender needs the tensors and a way to hand plain containers to every receiver, and nothing else of the process it is in.
"""

# ruff: noqa: B027

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from typing import Any, ClassVar, TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import Delta, RefitError, TensorSpec
from rlcore_vllm.channels.manifest import Manifest
from rlcore_vllm.setup.config import VllmConfig

Needs: TypeAlias = dict[str, list[list[list[int]]]]
"""Parts of tensors that a rank reads, as plain containers: [start, stop] of each slice by tensor. Others are read whole."""
LoadParts: TypeAlias = Callable[[dict[str, Tensor], Set[str]], None]
"""Loads tensors. Of those that are named beside them only the parts that were needed hold values."""


@frozen(kw_only=True)
class EngineRank:
    """One rank of one replica, as its worker describes itself."""

    replica: int
    rank: int
    pid: int
    host: str
    device: str
    """"cpu" or "cuda"."""
    uuid: str | None = None
    """The UUID of the CUDA device."""


@frozen(kw_only=True, eq=False)
class Received:
    """The tensors of a bucket on the receiver's side."""

    tensors: list[Tensor]
    stable: bool
    """Whether they keep their values until the refit ends."""


class Sender(ABC):
    """Puts buckets where the receivers find them."""

    num_slots: ClassVar[int] = 1
    """2 where a bucket may be put while the receivers still take the one before; 1 where the trainer must not even make it."""

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.sent_bytes: int | None = None
        """Bytes of this refit, where they are counted."""

    @abstractmethod
    def connect(self, ranks: Sequence[EngineRank]) -> list[dict[str, Any]]:
        """The options of each replica's receivers. RefitError where they cannot be reached this way.

        Receivers are made right afterwards; what has to wait for them is left to `join`.
        """

    def join(self) -> None:
        """Called while the receivers connect."""

    def begin(self, manifest: Manifest, delta: Delta = "off") -> None:
        """Prepare for a refit that begins; `delta` as in RefitRequest."""

    @abstractmethod
    def put(self, index: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Make bucket `index` of this refit reachable; returns, in plain containers, where it is."""

    def check(self) -> None:
        """Raise if what is on its way can no longer arrive."""

    def acknowledged(self, index: int) -> None:
        """Every receiver has taken bucket `index`."""

    def end(self) -> None:
        """The refit is over, well or badly: nothing of it is needed any more."""

    def close(self) -> None:
        """Free everything."""


class Receiver(ABC):
    """Takes buckets in one rank of an engine."""

    def __init__(self, device: torch.device, rank: int, options: dict[str, Any]) -> None:
        self.device = device
        self.rank = rank
        self.options = options
        self.persistent = False
        self.received_bytes = 0
        """What the last `take_shards` has brought."""

    def begin(self, persistent: bool) -> None:
        """A refit begins; `persistent` as in WeightExport."""
        self.persistent = persistent

    @abstractmethod
    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> Received:
        """The bucket that `put` described."""

    def take_shards(
        self,
        manifest: Manifest,  # noqa: ARG002
        layout: dict[str, Any],  # noqa: ARG002
        load: LoadParts,  # noqa: ARG002
        only_changed: bool,  # noqa: ARG002
    ) -> int:
        """Receive what the ranks of a sharded export send, and have it loaded; returns the sum of its digests. `layout` says
        by which route and, where that is a new one, what they hold; with `only_changed` what is known not to have changed
        need not be loaded."""
        raise RefitError("refit: found a sharded export by a channel for whole tensors; expected the channel shards")

    def loaded(self) -> None:
        """What the last `receive` gave has been loaded, on CUDA in the order of the current stream."""

    def end(self) -> None:
        """Release what the refit that has ended needed."""

    def close(self) -> None:
        """Free everything."""

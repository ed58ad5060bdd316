"""Keeps the shards of the last refit, which the delta of the next one is relative to."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rlcore.spi import TensorSpec
from rlcore.spi.weights import ShardSlice

NOTHING = -1
"""The version of copies that are not whole."""


class ShardCache:
    """Keeps one rank's shards, on the device or the host."""

    def __init__(self, device: torch.device) -> None:
        self.version = NOTHING
        self.tensors: dict[ShardSlice, Tensor] = {}
        self._device = device

    def require(self, boxes: Iterable[ShardSlice]) -> None:
        """Drop the copies of all other parts than these, which are sent or taken next; none has a version then."""
        if self.tensors.keys() != set(boxes):
            self.version, self.tensors = NOTHING, {}

    @contextmanager
    def changing(self, weight_version: int) -> Iterator[None]:
        """Between two versions, and after a failure, they are of none."""
        self.version = NOTHING
        yield
        self.version = weight_version

    def on(self, device: torch.device, spec: TensorSpec, box: ShardSlice) -> Tensor:
        """A part to receive into: the copy itself where it is on the device, else one of it. Of any values the first time."""
        if box not in self.tensors:
            self.tensors[box] = torch.empty(box.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        return self.tensors[box].to(device)

    def take_back(self, parts: Mapping[ShardSlice, Tensor]) -> None:
        """Parts that `on` had given out, and that have changed."""
        for box, part in parts.items():
            if part is not self.tensors[box]:
                self.tensors[box].copy_(part)

    def put(self, parts: Mapping[ShardSlice, Tensor], specs: Iterable[TensorSpec]) -> None:
        """Copy parts, cast on their own device: devices differ in the NaN that they cast to, and a copy has the bits that were
        sent."""
        by_name = {spec.name: spec for spec in specs}
        for box, part in parts.items():
            kept = self.on(self._device, by_name[box.name], box)
            kept.copy_(part.detach().to(kept.dtype))

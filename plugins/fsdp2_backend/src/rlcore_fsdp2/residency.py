"""Device memory handed back and filled again, underneath the tensors that use it."""

from collections.abc import Iterable, Sequence

import torch
from attrs import define, field
from torch import Tensor, UntypedStorage

from rlcore.spi import ContractError, SetResidencyRequest
from rlcore_fsdp2.sharding import local


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages of this rank's parts of `tensors`, each once."""
    unique = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        unique[storage._cdata] = storage
    return list(unique.values())


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that the storages of `tensors` hold now."""
    return sum(storage.nbytes() for storage in storages(tensors))


class HostCopy:
    """The content of freed device storages.

    A storage is emptied in place, so parameters, FSDP's own records, optimizer state and aliases elsewhere all stay valid objects
    and find their bytes again after `restore`. Pinned host memory is kept for the next time, since pinning is slow.
    """

    def __init__(self) -> None:
        self._freed: list[tuple[UntypedStorage, Tensor]] = []
        self._spare: dict[int, list[Tensor]] = {}

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the bytes of `tensors` to the host and free their device memory."""
        for storage in storages(tensors):
            if storage.nbytes() == 0:
                continue
            source = _bytes_of(storage)
            spare = self._spare.get(source.numel())
            target = spare.pop() if spare else torch.empty(source.numel(), dtype=torch.uint8, pin_memory=source.is_cuda)
            target.copy_(source, non_blocking=True)
            self._freed.append((storage, target))
        self._synchronize()
        for storage, _ in self._freed:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Allocate what was freed and copy the bytes back."""
        for storage, source in self._freed:
            storage.resize_(source.numel())
            _bytes_of(storage).copy_(source, non_blocking=True)
        self._synchronize()
        for _, source in self._freed:
            self._spare.setdefault(source.numel(), []).append(source)
        self._freed.clear()

    def _synchronize(self) -> None:
        if any(storage.device.type == "cuda" for storage, _ in self._freed):
            torch.cuda.synchronize()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@define(kw_only=True)
class Kind:
    """Tensors that move together, and where they are."""

    host_copy: HostCopy = field(factory=HostCopy)
    on_device: bool = True

    def move(self, tensors: Sequence[Tensor], *, to_device: bool, device: torch.device) -> None:
        """Nothing moves on CPU, where both places are one; which calls are legal changes all the same."""
        if to_device != self.on_device and device.type == "cuda":
            self.host_copy.restore() if to_device else self.host_copy.offload(tensors)
        self.on_device = to_device


@define(kw_only=True)
class Residency:
    """Where weights and optimizer state are, as set_residency asked last."""

    weights: Kind = field(factory=Kind)
    state: Kind = field(factory=Kind)

    def move(
        self, request: SetResidencyRequest, device: torch.device, weights: Sequence[Tensor], state: Sequence[Tensor]
    ) -> None:
        """Free before filling, so that both never need room at once."""
        kinds = [(self.weights, weights, request.weights == "device"), (self.state, state, request.state == "device")]
        for kind, tensors, to_device in sorted(kinds, key=lambda entry: entry[2]):
            kind.move(tensors, to_device=to_device, device=device)

    def require(self, hook: str, *, state: bool) -> None:
        """Raise ContractError unless the weights, and with `state` the optimizer's state, are on the device."""
        absent = [] if self.weights.on_device else ["weights"]
        absent += ["state"] if state and not self.state.on_device else []
        if absent:
            raise ContractError(f'{hook}: found {" and ".join(absent)} on the host; call set_residency with "device" first')

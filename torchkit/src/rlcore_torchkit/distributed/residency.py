"""Device memory handed back and filled again, underneath the tensors that use it."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from rlcore.spi.lifecycle import RESIDENT, SetResidencyRequest

BLOCK_BYTES = 2**26
"""Bytes of a block of host memory."""
NUM_PINNING_THREADS = 8
"""Threads that pin blocks side by side: each first writes a block's pages, most of the time that pinning takes."""
ALIGNED_BYTES = 512
"""Alignment of storages in a block, as in torch's allocator of devices; it divides BLOCK_BYTES."""
COMMON_POOL = (0, 0)
"""torch's id of the pool that tensors are in unless something says otherwise."""


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages of this rank's parts of `tensors`, each once."""
    unique = {}
    for tensor in tensors:
        part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = part.untyped_storage()
        unique[storage._cdata] = storage
    return list(unique.values())


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that the storages of `tensors` hold now."""
    return sum(storage.nbytes() for storage in storages(tensors))


def reserved_bytes(device: torch.device) -> int | None:
    """Bytes of `device` that this process's allocator keeps from others, used or not; None on CPU, and where it is not torch's
    own (PYTORCH_ALLOC_CONF), which alone tells of its segments. Without pools of their own, such as those that an engine in the
    same process has for its weights, cache and graphs."""
    if device.type != "cuda" or torch.cuda.get_allocator_backend() != "native":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    common = [each for each in segments if each["device"] == index and tuple(each["segment_pool_id"]) == COMMON_POOL]
    return sum(int(segment["total_size"]) for segment in common)


class HostCopy:
    """The content of freed device storages.

    A storage is emptied in place, so parameters, FSDP's own records, optimizer state and aliases elsewhere stay valid and
    find their bytes again after `restore`. Pinned host memory is kept for the next time, since pinning is slow: in blocks that
    hold one storage behind another. They do not come from torch's allocator of such memory, which rounds each request up to a
    power of two and pins with one thread.
    """

    def __init__(self) -> None:
        self._freed: list[tuple[UntypedStorage, list[Tensor]]] = []
        """Storages, and their bytes in pieces of blocks."""
        self._blocks: list[Tensor] = []
        self._used = 0
        """Bytes of the blocks that hold something, counted from the first one's start."""

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the bytes of `tensors` to the host and free their device memory. Where the host lacks room, all stay where they
        are."""
        sources = [(storage, _bytes_of(storage)) for storage in storages(tensors) if storage.nbytes()]
        end = self._used
        for _, source in sources:
            end = _aligned(end) + source.numel()
        missing = -(-end // BLOCK_BYTES) - len(self._blocks)
        self._blocks += host_blocks(max(0, missing), pinned=any(source.is_cuda for _, source in sources))
        copied, used_before = [], self._used
        try:
            for storage, source in sources:
                pieces = self._pieces(source.numel())
                for piece, part in zip(pieces, torch.split(source, [piece.numel() for piece in pieces]), strict=True):
                    piece.copy_(part, non_blocking=True)
                copied.append((storage, pieces))
        except BaseException:
            self._used = used_before
            raise
        self._freed += copied
        self._synchronize()
        for storage, _ in copied:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate what was freed and copy the bytes back."""
        for storage, pieces in self._freed:
            sizes = [piece.numel() for piece in pieces]
            storage.resize_(sum(sizes))
            for piece, part in zip(pieces, torch.split(_bytes_of(storage), sizes), strict=True):
                part.copy_(piece, non_blocking=True)
        self._synchronize()
        self._freed.clear()
        self._used = 0

    def _pieces(self, num_bytes: int) -> list[Tensor]:
        """Room for so many bytes, in the blocks' order."""
        pieces = []
        self._used = _aligned(self._used)
        while num_bytes:
            number, start = divmod(self._used, BLOCK_BYTES)
            piece = self._blocks[number][start : start + num_bytes]
            pieces.append(piece)
            self._used += piece.numel()
            num_bytes -= piece.numel()
        return pieces

    def _synchronize(self) -> None:
        if any(storage.device.type == "cuda" for storage, _ in self._freed):
            torch.cuda.synchronize()


def _aligned(start: int) -> int:
    """Return the first aligned place from `start` on."""
    return start + -start % ALIGNED_BYTES


def host_blocks(number: int, *, pinned: bool) -> list[Tensor]:
    """Memory of the host in blocks: all of it or, where there is no room, torch's error and none."""
    if not pinned:
        return [torch.empty(BLOCK_BYTES, dtype=torch.uint8) for _ in range(number)]
    with ThreadPoolExecutor(NUM_PINNING_THREADS, "pin", torch.cuda.set_device, (torch.cuda.current_device(),)) as pool:
        # Where one is refused, map asks for no more of them, and lets those go that it has.
        return list(pool.map(_pinned_block, range(number)))


def _pinned_block(_: int) -> Tensor:
    block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cuda.cudaHostRegister(block.data_ptr(), BLOCK_BYTES, 0))
    weakref.finalize(block, cuda.cudaHostUnregister, block.data_ptr()).atexit = False
    return block


class Discarded:
    """Freed device storages whose content is not needed again, but the tensors that use them are."""

    def __init__(self) -> None:
        self._freed: list[tuple[UntypedStorage, int]] = []

    def discard(self, tensors: Iterable[Tensor]) -> None:
        """Free the device memory of `tensors`."""
        for storage in storages(tensors):
            if storage.nbytes():
                self._freed.append((storage, storage.nbytes()))
                storage.resize_(0)

    def restore(self) -> None:
        """Allocate what was freed, filled with zeros."""
        for storage, size in self._freed:
            storage.resize_(size)
            _bytes_of(storage).zero_()
        self._freed.clear()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Residency:
    """Moves weights and optimizer state between device and host. On CPU both places are one and nothing moves."""

    def __init__(self, device: torch.device) -> None:
        self.moves = device.type == "cuda"
        self._weights, self._state, self._scratch = HostCopy(), HostCopy(), Discarded()
        self.last_request = RESIDENT

    def move(
        self, request: SetResidencyRequest, weights: Sequence[Tensor], state: Sequence[Tensor], scratch: Sequence[Tensor] = ()
    ) -> None:
        """Free before filling, so that the two never need room at once; also what the allocator holds unused, and `scratch`."""
        self.last_request = request
        if not self.moves:
            return
        if request.weights == "host":
            self._weights.offload(weights)
        if request.state == "host":
            self._state.offload(state)
        self._scratch.discard(scratch)
        torch.cuda.empty_cache()
        if request.weights == "device":
            self._weights.restore()
        if request.state == "device":
            self._state.restore()

    @contextmanager
    def resident(self, move: Callable[[SetResidencyRequest], object]) -> Iterator[None]:
        """Have `move` bring everything to the device for as long as it takes to read or write it. What is there already stays,
        gradients between the pieces of a step among it."""
        before = self.last_request
        if before == RESIDENT:
            yield
            return
        move(RESIDENT)
        try:
            yield
        finally:
            move(before)

    def restore_scratch(self) -> None:
        """Allocate the scratch tensors that `move` has freed, filled with zeros."""
        self._scratch.restore()

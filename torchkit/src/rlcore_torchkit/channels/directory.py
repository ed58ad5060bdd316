"""Safetensors files in a folder that both sides see; with a shared folder, across machines."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.schema.file_limits import expanded
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
from rlcore_torchkit.refit.delta_encoding import encode, patch

_CODE = "changes"
"""Stands for all tensors of a bucket in its file."""
_SHARED_MEMORY = Path("/dev/shm")


class Sender(ChannelSender):
    """Sends each bucket as a file, written under another name first and removed once every receiver has loaded it."""

    num_slots = 2

    def __init__(self, options: ChannelOptions, device: torch.device) -> None:
        super().__init__(options, device)
        self._folder: Path | None = None
        self._delta: Delta = "off"
        self._specs: tuple[TensorSpec, ...] = ()
        self._last = BucketCache(device)
        """The buckets of the refit before, as every receiver has them: each is made after this sender, and lost with it."""
        self._series = 0
        """Counts the refits that nothing before them is kept for, by which receivers know when to give up theirs."""

    def connect(self, ranks: Sequence[ReceiverRank]) -> list[dict[str, Any]]:
        return [{} for _ in {rank.replica for rank in ranks}]

    def begin(self, specs: tuple[TensorSpec, ...], *, persistent: bool, delta: Delta = "off") -> None:  # noqa: ARG002
        self.end()
        self.sent_bytes = 0
        if (delta, specs) != (self._delta, self._specs):
            self._last, self._series = BucketCache(self.device), self._series + 1
        self._delta, self._specs = delta, specs
        total_bytes = sum(num_bytes(spec) for spec in specs)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="rlcore-refit-", dir=self._root(total_bytes)))
            self._folder.chmod(0o755)
        except OSError as error:
            raise _write_error(self.options.directory or tempfile.gettempdir(), error) from error

    def put(self, index: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        file = self._file(index)
        unfinished = file.with_suffix(".part")
        content = {_key(number): tensor.contiguous() for number, tensor in enumerate(tensors)}
        if self._delta != "off":
            content = self._changes(index, tensors) or content
        self.sent_bytes = (self.sent_bytes or 0) + sum(tensor.nbytes for tensor in content.values())
        try:
            save_file(content, unfinished)
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())
            unfinished.rename(file)
        except (OSError, SafetensorError) as error:
            raise _write_error(str(file.parent), error) from error
        return {"file": str(file), "index": index, "delta": self._delta, "series": self._series}

    def acknowledged(self, index: int) -> None:
        self._file(index).unlink()

    def end(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        self.end()

    def _changes(self, index: int, tensors: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """Encode the changes in a bucket since it was sent last; None where that saves nothing."""
        buffer = torch.zeros(packed_bytes([tensor.nbytes for tensor in tensors]), dtype=torch.uint8, device=self.device)
        pack(tensors, buffer)
        last, keeps_on = self._last.get(index), self._delta
        self._last.keep(index, buffer, keeps_on)
        code = None if last is None or len(last) != len(buffer) else encode(buffer, last)
        return None if code is None else {_CODE: code}

    def _file(self, index: int) -> Path:
        if self._folder is None:
            raise RefitError("refit: a bucket came before the refit had begun")
        return self._folder / f"bucket-{index:05}.safetensors"

    def _root(self, total_bytes: int) -> str | None:
        """The folder named in the recipe; else shared memory if it would hold everything twice; else the temporary folder."""
        if self.options.directory is not None:
            return str(expanded(self.options.directory))
        if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= 2 * total_bytes:
            return str(_SHARED_MEMORY)
        return None


class BucketCache:
    """Keeps a copy of each bucket, by its number."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, Tensor] = {}

    def get(self, index: int) -> Tensor | None:
        """Return the copy of a bucket on the device; None where there is none."""
        buffer = self._buffers.get(index)
        return None if buffer is None else buffer.to(self._device)

    def keep(self, index: int, buffer: Tensor, where: Delta) -> None:
        """Keep a bucket, on the host or on its own device."""
        self._buffers[index] = buffer.cpu() if where == "host" else buffer


class Receiver(ChannelReceiver):
    def __init__(self, device: torch.device, rank: int, options: dict[str, Any]) -> None:
        super().__init__(device, rank, options)
        self._last, self._series = BucketCache(device), 0

    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> ReceivedBucket:
        try:
            tensors = load_file(where["file"], device=str(self.device))
        except FileNotFoundError as error:
            remedy = "Set the generator's refit_directory to a folder that every machine of the run sees"
            raise RefitError(f"refit: {where['file']} is not to be seen here. {remedy}") from error
        if (series := where.get("series", 0)) != self._series:
            self._last, self._series = BucketCache(self.device), series
        if where.get("delta", "off") == "off":
            return ReceivedBucket(tensors=[tensors[_key(number)] for number in range(len(specs))], stable=True)
        index, size = where["index"], packed_bytes([num_bytes(spec) for spec in specs])
        if _CODE in tensors:
            buffer = self._last.get(index)
            if buffer is None or len(buffer) != size:
                raise RefitError(f"refit: found changes of bucket {index}, of which nothing is kept here; expected all of it")
            patch(buffer, tensors[_CODE])
        else:
            buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
            pack([tensors[_key(number)] for number in range(len(specs))], buffer)
        self._last.keep(index, buffer, where["delta"])
        return ReceivedBucket(tensors=unpack(buffer, specs), stable=True)


def _key(number: int) -> str:
    """Tensors are named by their place in the bucket; what they are called is in the message that announces it."""
    return f"{number:05}"


def _write_error(folder: str, error: Exception) -> RefitError:
    remedy = "Free some space there, or set the generator's refit_directory to another folder"
    return RefitError(f"refit: writing weights to {folder} failed: {error}. {remedy}")

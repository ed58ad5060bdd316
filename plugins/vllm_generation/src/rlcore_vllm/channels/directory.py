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

from rlcore.spi import RefitError, TensorSpec
from rlcore_vllm.channels import channel
from rlcore_vllm.channels.channel import EngineRank, Received
from rlcore_vllm.channels.packing import num_bytes
from rlcore_vllm.config import VllmConfig
from rlcore_vllm.manifest import Manifest

_SHARED_MEMORY = Path("/dev/shm")


class Sender(channel.Sender):
    """One file a bucket, written under another name first and removed once every receiver has loaded it."""

    num_slots = 2

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._folder: Path | None = None

    def connect(self, ranks: Sequence[EngineRank]) -> list[dict[str, Any]]:
        return [{} for _ in {rank.replica for rank in ranks}]

    def begin(self, manifest: Manifest) -> None:
        self.end()
        total_bytes = sum(num_bytes(spec) for spec in manifest.specs)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="rlcore-refit-", dir=self._root(total_bytes)))
            self._folder.chmod(0o755)
        except OSError as error:
            raise _write_error(self.config.refit_directory or tempfile.gettempdir(), error) from error

    def put(self, index: int, tensors: Sequence[Tensor]) -> dict[str, Any]:
        file = self._file(index)
        unfinished = file.with_suffix(".part")
        try:
            save_file({_key(number): tensor.contiguous() for number, tensor in enumerate(tensors)}, unfinished)
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())
            unfinished.rename(file)
        except (OSError, SafetensorError) as error:
            raise _write_error(str(file.parent), error) from error
        return {"file": str(file)}

    def acknowledged(self, index: int) -> None:
        self._file(index).unlink()

    def end(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def close(self) -> None:
        self.end()

    def _file(self, index: int) -> Path:
        if self._folder is None:
            raise RefitError("refit: a bucket came before the refit had begun")
        return self._folder / f"bucket-{index:05}.safetensors"

    def _root(self, total_bytes: int) -> str | None:
        """The folder named in the recipe; else shared memory if it would hold everything twice; else the temporary folder."""
        if self.config.refit_directory is not None:
            return str(Path(self.config.refit_directory).expanduser())
        if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free >= 2 * total_bytes:
            return str(_SHARED_MEMORY)
        return None


class Receiver(channel.Receiver):
    def receive(self, where: dict[str, Any], specs: Sequence[TensorSpec]) -> Received:
        try:
            tensors = load_file(where["file"], device=str(self.device))
        except FileNotFoundError as error:
            remedy = "Set generator.vllm.refit_directory to a folder that every machine of the run sees"
            raise RefitError(f"refit: {where['file']} is not to be seen here. {remedy}") from error
        return Received(tensors=[tensors[_key(number)] for number in range(len(specs))], stable=True)


def _key(number: int) -> str:
    """Tensors are named by their place in the bucket; what they are called is in the message that announces it."""
    return f"{number:05}"


def _write_error(folder: str, error: Exception) -> RefitError:
    remedy = "Free some space there, or set generator.vllm.refit_directory to another folder"
    return RefitError(f"refit: writing weights to {folder} failed: {error}. {remedy}")

"""Adapters as a run began with them, which stand for its reference: kept beside those that train, and in checkpoints."""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.spi.errors import CheckpointError
from rlcore_torchkit.huggingface.hf_directory import model_storage_errors

FILE = "reference_adapters.safetensors"


def save_reference(directory: Path, adapters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Write whole adapters by name into a checkpoint; returns the name of the file. StorageError where the disk refuses it."""
    with model_storage_errors(directory):
        save_file({name: tensor.contiguous() for name, tensor in adapters.items()}, directory / FILE)
    return (FILE,)


def load_reference(directory: Path) -> dict[str, Tensor] | None:
    """Read what `save_reference` wrote, onto the host; None where the run began with the model alone. CheckpointError on
    failure."""
    if not (directory / FILE).exists():
        return None
    try:
        return load_file(directory / FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory / FILE} cannot be read ({error}); resume from another checkpoint") from error

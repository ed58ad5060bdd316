"""Reads the description of a distributed checkpoint without running its pickles, and compares it with the model."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rlcore.spi import CheckpointError
from rlcore_megatron.training.shard_states import StateKind
from rlcore_torchkit.trainer.trainer_hooks import check_same_shapes

Shape: TypeAlias = tuple[int, ...]

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "collections": {"OrderedDict"},
}
"""Classes and functions that torch and Megatron describe a checkpoint with, by module; torch's dtypes besides."""


class _Unpickler(pickle.Unpickler):
    """Reads torch's `.metadata` and nothing else: a pickle that names other functions is refused before it calls them."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in _RECORDS.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def read_metadata(state: Path) -> Metadata:
    """The description of a checkpoint whose files are all there, in full length. CheckpointError otherwise."""
    try:
        with (state / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
    except Exception as error:  # whatever a damaged pickle leads to
        raise CheckpointError(f"{state}/.metadata cannot be read ({error}); resume from another checkpoint") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(
            f"{state}/.metadata: found a {type(metadata).__name__}; expected torch's Metadata of a checkpoint"
        )
    _check_files(state, metadata)
    return metadata


def require_seen(state: Path) -> None:
    """CheckpointError where this rank does not see a checkpoint's directory."""
    if not state.is_dir():
        raise CheckpointError(f"{state}: found no such directory; expected it on a file system that all ranks share")


def _check_files(state: Path, metadata: Metadata) -> None:
    ends = {"metadata.json": 1}
    for part in metadata.storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        size = (state / name).stat().st_size if (state / name).is_file() else -1
        if size < end:
            found = "no such file" if size < 0 else f"{size} bytes"
            raise CheckpointError(f"{state / name}: found {found}; expected at least {end}. Resume from another checkpoint")


def check_kind(path: Path, stored: StateKind, expected: StateKind) -> None:
    """CheckpointError unless each tensor of a checkpoint has state of the kind that `[optimizer]` gives it."""
    keys = [f"optimizer.{key}" for key in ("name", "moments") if getattr(stored, key) != getattr(expected, key)]
    others = sorted(set(stored.outside_muon) ^ set(expected.outside_muon))
    if others and "optimizer.name" not in keys:
        keys.append(f"optimizer.groups for {', '.join(others[:3])}{' and others' if others[3:] else ''}")
    if keys:
        found = f"state of {stored.name} with moments in {stored.moments}"
        raise CheckpointError(
            f"{path}: found {found}; expected that of the recipe, which differs in {', '.join(keys)}. "
            "Set optimizer.name, moments and groups as in the run that saved it, or resume from another checkpoint"
        )


def check_shapes(
    state: Path, metadata: Metadata, weights: Mapping[str, Shape], states: Mapping[str, Shape], prefix: str
) -> None:
    """CheckpointError unless the checkpoint has exactly the names and shapes of `weights`, and those of the optimizer's
    `states`, whose names alone begin with `prefix`."""
    stored = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    check_same_shapes(state, {name: shape for name, shape in stored.items() if not name.startswith(prefix)}, weights)
    kinds = sorted({name.removeprefix(prefix).partition(".")[0] for name in stored if name.startswith(prefix)})
    for name, shape in states.items():
        if name not in stored and kinds:
            raise CheckpointError(
                f"{state}: found state of the kinds {', '.join(kinds)} and no {name}; expected the optimizer of the recipe. "
                "Set optimizer.name, moments and groups as in the run that saved it, or resume from another checkpoint"
            )
        if stored.get(name) != shape:
            found = list(stored[name]) if name in stored else "nothing"
            raise CheckpointError(f"{state}: found {found} for {name}; expected {list(shape)}. Resume from another checkpoint")

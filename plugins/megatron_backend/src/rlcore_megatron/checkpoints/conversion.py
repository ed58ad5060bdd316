"""A copy of a Hugging Face model in Megatron's distributed format, made the first time and read from then on, in any layout."""

import hashlib
import json
import logging
import re
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from rlcore.schema.file_limits import expanded
from rlcore.spi import CheckpointError, ConfigError, ModelSpec, Problem, StorageError
from rlcore.spi.weights import ITEM_BYTES
from rlcore_megatron.checkpoints import distributed_weights
from rlcore_megatron.checkpoints.cache_directory import ELSEWHERE, cache_directory, directory_problems
from rlcore_megatron.families.weight_mapping import Names
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.weights.load import load_hf
from rlcore_torchkit.distributed.agreement import first_rank, together
from rlcore_torchkit.distributed.format_bytes import gib
from rlcore_torchkit.huggingface.hf_directory import model_storage_errors
from rlcore_torchkit.huggingface.safetensors_files import model_file, weight_files

logger = logging.getLogger(__name__)

FORMAT = 1
MARK = "complete.json"
"""Written after all else: the size of every other file, in bytes."""
VISIBLE_WITHIN_S = 10.0
"""Seconds that shared storage may take to show one node what another has made."""
ABANDONED_AFTER_S = 24 * 3600.0
"""The age at which a copy that was begun counts as left behind."""
State = Literal["complete", "absent", "damaged"]


def load(model_chunks: Sequence[Any], hf: Any, spec: ModelSpec, layout: ParallelLayout) -> None:
    """Fill the model chunks from the copy, or from the model and then make the copy; together with all other ranks.

    A damaged copy is made anew. ConfigError where there is no room for it, or where nodes do not share the directory;
    StorageError where writing it fails.
    """
    copy, state = first_rank(lambda: _look(spec))
    if state == "complete":
        together(lambda: _check_shared(copy / MARK))
        if _read(copy, model_chunks):
            return
        state = "damaged"
    if state == "damaged":
        first_rank(lambda: _remove(copy))
    first_rank(lambda: _check_room(hf, spec))
    load_hf(model_chunks, hf, spec, layout)
    begun = first_rank(lambda: _begin(copy))
    together(lambda: _check_shared(begun))
    try:
        distributed_weights.write(begun, model_chunks)
    except StorageError:
        shutil.rmtree(begun, ignore_errors=True)
        raise
    first_rank(lambda: _finish(begun, copy))


def copy_directory(spec: ModelSpec) -> Path:
    """The path of this model's copy, whether it exists or not; it depends on the weights, the dtype and Megatron's version."""
    is_local = expanded(spec.path).is_dir()
    config = model_file(spec, "config.json")
    files = [*([] if config is None else [config]), *weight_files(spec)]
    identity = {
        "format": FORMAT,
        "megatron-core": version("megatron-core"),
        "dtype": spec.dtype,
        "files": {file.name: _identity(file, is_local=is_local) for file in files},
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    name = re.sub(r"[^\w.-]+", "--", spec.path.strip("/"))[-80:].lstrip(".-")
    return cache_directory() / f"{name}-{digest}"


def _identity(file: Path, *, is_local: bool) -> list[int | str]:
    """Changes with the content, which is not read; the Hub's cache names files by it."""
    found = file.resolve()
    status = found.stat()
    return [status.st_size, status.st_mtime_ns if is_local else found.name]


def _look(spec: ModelSpec) -> tuple[Path, State]:
    copy = copy_directory(spec)
    return copy, _state(copy)


def _state(copy: Path) -> State:
    if not copy.exists():
        return "absent"
    try:
        is_whole = json.loads((copy / MARK).read_text(encoding="utf-8")) == _sizes(copy)
    except (OSError, ValueError):
        is_whole = False
    return "complete" if is_whole else "damaged"


def _sizes(directory: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(directory.iterdir()) if file.name != MARK}


def _check_shared(made: Path) -> None:
    """Raise where this rank does not see the directory that rank 0 made."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not made.exists():
        if time.monotonic() > deadline:
            found = f"{made}, which only some nodes see"
            expected = "storage that all nodes share"
            raise ConfigError([Problem(path=str(made.parent), found=found, expected=expected, remedy=ELSEWHERE)])
        time.sleep(0.1)


def _read(copy: Path, model_chunks: Sequence[Any]) -> bool:
    """Return whether the copy could be read, the same on every rank."""
    try:
        distributed_weights.read(copy, model_chunks)
    except CheckpointError as error:
        if dist.get_rank() == 0:
            logger.warning("%s", error)
        return False
    with suppress(OSError):  # another job has found it damaged since: the other ranks go on, and wait for this one
        if dist.get_rank() == 0:
            logger.info("read the weights from %s (%s)", copy, gib(sum(_sizes(copy).values())))
    return True


def _check_room(hf: Any, spec: ModelSpec) -> None:
    elements = sum(prod(tensor.shape) for tensor in Names.of(hf).order)
    problems = list(directory_problems(cache_directory(), elements * ITEM_BYTES[spec.dtype]))
    if problems:
        raise ConfigError(problems)


def _begin(copy: Path) -> Path:
    """A directory beside the copy that no other job uses."""
    with model_storage_errors(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        for other in copy.parent.glob(f".{copy.name}.*"):
            with suppress(FileNotFoundError):  # another job has just finished it
                if time.time() - other.stat().st_mtime > ABANDONED_AFTER_S:
                    shutil.rmtree(other, ignore_errors=True)
        begun = copy.with_name(f".{copy.name}.{uuid.uuid4().hex}")
        begun.mkdir()
    return begun


def _finish(begun: Path, copy: Path) -> None:
    """Give the copy its name, unless another job was faster."""
    with model_storage_errors(copy):
        sizes = _sizes(begun)
        (begun / MARK).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")
        try:
            begun.rename(copy)
        except OSError:
            if _state(copy) != "complete":
                raise
            shutil.rmtree(begun, ignore_errors=True)
    logger.info("keeping the model in Megatron's format in %s (%s)", copy, gib(sum(sizes.values())))


def _remove(copy: Path) -> None:
    """A damaged copy; in one step for others, who may be reading it."""
    logger.warning("%s is damaged: the model is converted anew", copy)
    away = copy.with_name(f".{copy.name}.{uuid.uuid4().hex}")
    with model_storage_errors(copy), suppress(FileNotFoundError):  # another job was faster
        copy.rename(away)
    shutil.rmtree(away, ignore_errors=True)

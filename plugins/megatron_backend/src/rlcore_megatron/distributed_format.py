"""Files of Megatron's distributed format (torch_dist); what goes wrong with one is an error on every rank."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, CheckpointingException, save_config
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.checkpointable import CheckpointableShardedTensor, LocalShardsContainer
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed import checkpoint
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    Metadata,
    SavePlan,
    SavePlanner,
)

from rlcore.spi import CheckpointError
from rlcore_megatron.optimizer_shards import CONTENT
from rlcore_torchkit.agreement import together
from rlcore_torchkit.hf_directory import model_storage_errors

COMMON_FILES = (".metadata", COMMON_STATE_FNAME, "metadata.json")
"""Written by rank 0, `.metadata` after everything else."""


def write(directory: Path, tensors: Sequence[ShardedTensor]) -> tuple[str, ...]:
    """Write this rank's `tensors`, together with all other ranks, into a directory that is made here; the names of this rank's
    files. Of replicas the main one is written. StorageError on every rank where the disk refuses a file of one.

    Not by Megatron's own function, which first copies everything to the host, then writes from forked processes, and waits
    forever for one that dies.
    """
    rank = dist.get_rank()
    together(lambda: _begin(directory, rank))
    with _writing_errors(directory):
        checkpoint.save(
            _by_name(tensors), storage_writer=_Writer(directory), planner=DefaultSavePlanner(flatten_state_dict=False)
        )
    mine = sorted(path.name for path in directory.glob(f"__{rank}_*.distcp"))
    return (*(COMMON_FILES if rank == 0 else ()), *mine)


def read(directory: Path, tensors: Sequence[ShardedTensor], metadata: Metadata) -> None:
    """Fill this rank's `tensors`, together with all other ranks, from a checkpoint of this description. CheckpointError on
    every rank where one of them cannot.

    Not by Megatron's own function, which unpickles whatever else the checkpoint was written with.
    """
    try:
        with _described(metadata):
            TorchDistLoadShardedStrategy().load(dict(enumerate(tensors)), directory)
    except (CheckpointException, CheckpointingException) as failure:
        found = _cause(failure) if isinstance(failure, CheckpointException) else failure
        raise CheckpointError(f"{directory}: a tensor cannot be read ({found}); take another checkpoint") from failure


class _Reader(FileSystemReader):
    """Reads the tensors of a checkpoint whose description is known: each rank that opens it for itself costs the storage one
    more read of a file that grows with the ranks, and runs what the pickle says."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._known = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._known


@contextmanager
def _described(metadata: Metadata) -> Iterator[None]:
    """Have Megatron read by this description; it makes its reader itself."""
    made = strategies._get_filesystem_reader
    strategies._get_filesystem_reader = lambda directory, **_: _Reader(directory, metadata)
    try:
        yield
    finally:
        strategies._get_filesystem_reader = made


def _begin(directory: Path, rank: int) -> None:
    """The files that Megatron wants beside torch's."""
    with model_storage_errors(directory):
        directory.mkdir(exist_ok=True)
        if rank == 0:
            content = BytesIO()
            torch.save({"content_metadata": CONTENT}, content)
            (directory / COMMON_STATE_FNAME).write_bytes(content.getvalue())
            save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def _by_name(tensors: Sequence[ShardedTensor]) -> dict[str, LocalShardsContainer]:
    """What this rank is to write, as torch's planner takes it."""
    found = defaultdict(list)
    for tensor in tensors:
        if is_main_replica(tensor.replica_id):
            found[tensor.key].append(CheckpointableShardedTensor.from_sh_ten(tensor))
    return {name: LocalShardsContainer(parts) for name, parts in found.items()}


class _Writer(FileSystemWriter):
    """Writes tensor by tensor, with the system's own error where that fails: torch's archives raise one of their own.

    In one thread, since torch takes no notice of what fails in others.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise OSError(error.__context__.errno, error.__context__.strerror) from error
            raise

    def storage_meta(self) -> None:
        """Nothing that differs from one directory to another."""


@contextmanager
def _writing_errors(directory: Path) -> Iterator[None]:
    try:
        with model_storage_errors(directory):
            yield
    except CheckpointException as failure:
        with model_storage_errors(directory):
            raise _cause(failure) from failure


def _cause(failure: CheckpointException) -> BaseException:
    """What went wrong on the first of the ranks that failed, the system's own error if there is one."""
    errors = [error for error, _ in failure.failures.values()]
    return next((error for error in errors if isinstance(error, OSError)), errors[0])

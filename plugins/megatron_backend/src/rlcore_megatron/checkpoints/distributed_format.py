"""Files of Megatron's distributed format (torch_dist); what goes wrong with one is an error on every rank."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import checkpoint
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from rlcore.spi import CheckpointError
from rlcore_megatron.training.optimizer_shards import CONTENT
from rlcore_torchkit.distributed.agreement import together
from rlcore_torchkit.huggingface.hf_directory import model_storage_errors

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
    # Together: whoever returned before others had looked could give the directory another name.
    mine = together(lambda: sorted(path.name for path in directory.glob(f"__{rank}_*.distcp")))
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
    """Reads the tensors of a checkpoint of a known description, which rank 0 alone has read without running its pickle.

    Of a stored tensor that it needs a part of, it reads from that part's first element to its last. torch reads all of it, and
    so would each of the ranks that share a tensor, where another layout has written it whole.
    """

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._known = metadata
        self._sizes = {
            (name, chunk.offsets): chunk.sizes
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        self._unread = FakeTensorMode()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._known

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        parts = [item for item in plan.items if self._is_part(item)]
        done = super().read_data(replace(plan, items=[item for item in plan.items if not self._is_part(item)]), planner)
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in parts:
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for path, items in by_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, path), "rb") as stream:
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._part(stream, item))
                    planner.commit_tensor(item, target)
        return done

    def _is_part(self, item: ReadItem) -> bool:
        index = item.storage_index
        is_plain = not self.storage_data[index].transform_descriptors
        return is_plain and self._sizes.get((index.fqn, index.offset), item.lengths) != item.lengths

    def _part(self, stream: Any, item: ReadItem) -> Tensor:
        stored = self.storage_data[item.storage_index]
        with self._unread:
            whole = torch.load(self._slice_file(stream, stored), map_location="cpu", weights_only=True)
        part = narrow_tensor_by_index(whole, item.storage_offsets, item.lengths)
        span = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True)) + 1
        found = torch.empty(span, dtype=part.dtype)
        stream.seek(stored.offset + whole.untyped_storage()._checkpoint_offset + part.storage_offset() * part.itemsize)
        if stream.readinto(found.view(torch.uint8).numpy()) != found.nbytes:
            raise CheckpointError(f"{stored.relative_path} ends within {item.storage_index.fqn}; take another checkpoint")
        return found.as_strided(part.shape, part.stride())


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
    """Return the tensors that this rank writes, as torch's planner takes them."""
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
    """Return the error of the first rank that failed, the system's own if there is one."""
    errors = [error for error, _ in failure.failures.values()]
    return next((error for error in errors if isinstance(error, OSError)), errors[0])

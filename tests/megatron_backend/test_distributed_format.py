"""Files of Megatron's distributed format on one rank; several ranks write and read them in test_checkpoint."""

import io
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing import load as load_as_megatron
from torch.distributed import checkpoint
from torch.distributed.checkpoint.filesystem import FileSystem

from rlcore.spi import CheckpointError, StorageError
from rlcore_megatron.checkpoints.checkpoint_check import read_metadata
from rlcore_megatron.checkpoints.distributed_format import read, write
from rlcore_megatron.training.optimizer_shards import boxes


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def halves(whole: torch.Tensor, name: str = "a") -> list[ShardedTensor]:
    """A tensor as two ranks have it."""
    return [ShardedTensor.from_rank_offsets(name, part, (0, number, 2)) for number, part in enumerate(whole.chunk(2))]


def test_parts_are_read_as_other_parts(tmp_path: Path) -> None:
    whole, other = torch.randn(6, 4), torch.randn(2, 3).bfloat16()
    files = write(tmp_path / "state", [*halves(whole), ShardedTensor.from_rank_offsets("b", other)])
    assert sorted(files) == sorted(path.name for path in (tmp_path / "state").iterdir())
    found, again = torch.zeros(6, 4), torch.zeros(2, 3).bfloat16()
    read(
        tmp_path / "state",
        [ShardedTensor.from_rank_offsets("a", found), *halves(again, "b")],
        read_metadata(tmp_path / "state"),
    )
    assert torch.equal(found, whole)
    assert torch.equal(again, other)


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a file of tensors."""
    found: list[int] = []

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            found.append(super().readinto(buffer) or 0)
            return found[-1]

        def readall(self) -> bytes:
            content = super().readall()
            found.append(len(content))
            return content

    @contextmanager
    def create_stream(self: FileSystem, path: Path, mode: str) -> Iterator[Any]:
        with io.BufferedReader(Counting(path)) if mode == "rb" else Path(path).open(mode) as stream:
            yield stream

    monkeypatch.setattr(FileSystem, "create_stream", create_stream)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_of_another_layout_read_what_they_need_of_a_tensor(
    dtype: torch.dtype, num_read: list[int], tmp_path: Path
) -> None:
    """Ranks that divide it, and runs of its elements as a distributed optimizer has them, read it once together."""
    whole, other = torch.randn(512, 4096).to(dtype), torch.randn(64, 8, 256).to(dtype)
    write(tmp_path / "state", [ShardedTensor.from_rank_offsets("a", whole), ShardedTensor.from_rank_offsets("b", other)])
    metadata = read_metadata(tmp_path / "state")
    found = torch.zeros_like(whole), torch.zeros_like(other)
    for rank in range(8):
        mine = ShardedTensor.from_rank_offsets("a", found[0][64 * rank : 64 * (rank + 1)], (0, rank, 8))
        first, beyond = 16000 * rank, 16000 * (rank + 1) if rank < 7 else other.numel()
        runs = [
            ShardedTensor(
                key="b",
                data=found[1][tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))],
                dtype=dtype,
                local_shape=shape,
                global_shape=tuple(other.shape),
                global_offset=offset,
                axis_fragmentations=None,
            )
            for offset, shape in boxes(other.shape, first, beyond)
        ]
        read(tmp_path / "state", [mine, *runs], metadata)
    assert torch.equal(found[0], whole)
    assert torch.equal(found[1], other)
    assert whole.nbytes + other.nbytes < sum(num_read) < 1.5 * (whole.nbytes + other.nbytes)


def test_columns_are_read_as_the_rows_between_them(num_read: list[int], tmp_path: Path) -> None:
    whole = torch.randn(512, 1024)
    write(tmp_path / "state", [ShardedTensor.from_rank_offsets("a", whole)])
    found = torch.zeros(512, 256)
    read(tmp_path / "state", [ShardedTensor.from_rank_offsets("a", found, (1, 2, 4))], read_metadata(tmp_path / "state"))
    assert torch.equal(found, whole[:, 512:768])


def test_of_replicas_the_main_one_is_written(tmp_path: Path) -> None:
    tensors = [ShardedTensor.from_rank_offsets("a", torch.full((3,), float(number)), replica_id=number) for number in (1, 0)]
    write(tmp_path / "state", tensors)
    found = torch.ones(3)
    read(tmp_path / "state", [ShardedTensor.from_rank_offsets("a", found)], read_metadata(tmp_path / "state"))
    assert not found.any()


def test_megatrons_own_function_reads_it(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    write(tmp_path / "state", halves(whole))
    found = load_as_megatron({"x": ShardedTensor.from_rank_offsets("a", torch.zeros(6, 4))}, str(tmp_path / "state"))
    assert torch.equal(found["x"], whole)


def test_content_that_cannot_be_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    write(tmp_path / "state", halves(torch.randn(6, 4)))
    (file,) = (tmp_path / "state").glob("*.distcp")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path / "state", halves(torch.zeros(6, 4)), read_metadata(tmp_path / "state"))


class Harmful:
    """Says in its pickle that reading it is to make a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def test_an_index_that_calls_a_tensor_an_object_has_nothing_unpickled(tmp_path: Path) -> None:
    state = tmp_path / "state"
    checkpoint.save({"a": Harmful(tmp_path / "made")}, checkpoint_id=state, no_dist=True)
    (state / "metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(state, halves(torch.zeros(6, 4)), read_metadata(state))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("limit", [16, 4096])
def test_a_disk_that_is_full_is_a_storage_error(limit: int, tmp_path: Path) -> None:
    """Whether the first file or the tensors' does not fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            write(tmp_path / "state", halves(torch.randn(60, 400)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

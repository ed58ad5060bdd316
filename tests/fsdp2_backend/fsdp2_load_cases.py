"""What each rank does in the tests of test_load that need several: reading its parts of a model's files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp2_group_cases import ARCHITECTURES, Cases, Place
from fsdp2_support import make_config
from torch import Tensor
from transformers import PreTrainedModel

from rlcore.spi import ModelError, ModelSpec, OptimizerSpec, Problem, RankInfo
from rlcore_fsdp2 import checkpoint, load
from rlcore_fsdp2.export import whole
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.optimizer import Optimizer
from rlcore_fsdp2.policy import make_policy, make_reference
from rlcore_fsdp2.sharding import is_first_copy, local
from rlcore_fsdp2.trained_parameters import TrainedParameter
from rlcore_torchkit.huggingface.models import load_model
from rlcore_torchkit.huggingface.safetensors_files import TensorFiles
from rlcore_torchkit.optimizer.settings import tensor_settings

SPEC = OptimizerSpec()
CASES = Cases()
CPU = torch.device("cpu")
SHARE = 1.15
"""A rank's elements, relative to an equal share: some parameters do not divide evenly, and some are on every tensor rank."""


@contextmanager
def reading() -> Iterator[list[int]]:
    """How many elements each block has that is read of a file; nothing else loads a model."""
    found: list[int] = []
    read = TensorFiles.read

    def counted(files: TensorFiles, name: str, bounds: Sequence[slice], dtype: torch.dtype) -> Tensor:
        block = read(files, name, bounds, dtype)
        found.append(block.numel())
        return block

    whole_model = AssertionError("the whole model is loaded")
    with (
        mock.patch.object(TensorFiles, "read", counted),
        mock.patch.object(PreTrainedModel, "from_pretrained", side_effect=whole_model),
    ):
        yield found


def assert_is(model: Any, expected: Any) -> None:
    """The same parameters, tied alike, and buffers."""
    found = {name: whole(parameter.detach(), parameter.dtype, CPU) for name, parameter in model.named_parameters()}
    parameters, buffers = dict(expected.named_parameters()), dict(expected.named_buffers())
    assert list(found) == list(parameters)
    assert dict(model.named_buffers()).keys() == buffers.keys() != set()
    for name, tensor in (found | dict(model.named_buffers())).items():
        wanted = (parameters | buffers)[name]
        assert tensor.dtype == wanted.dtype, name
        assert torch.equal(tensor, wanted), name


def check_layout(place: Place, architecture: str, **options: Any) -> None:
    """Each element is read by one of the ranks that hold it, once, and a rank reads no other."""
    config = make_config(**options)
    layout = ParallelLayout.of(config, place.rank, place.num_ranks)
    # With expert parallelism tensor ranks hold the same experts.
    num_copies = layout.replicate * (layout.tensor if layout.expert > 1 else 1)
    meshes = layout.meshes("cpu")
    spec = ModelSpec(path=str(place.models / architecture), dtype="bfloat16")
    makers = {torch.float32: lambda: make_policy(spec, config, meshes, CPU)[0]}
    makers[torch.bfloat16] = lambda: make_reference(spec, config, meshes, CPU)
    for dtype, make in makers.items():
        expected = load_model(spec, dtype=dtype)
        with reading() as blocks:
            model = make()
        own = sum(local(parameter).numel() for parameter in model.parameters())
        total = sum(parameter.numel() for parameter in expected.parameters())
        assert sum(blocks) == sum(local(each).numel() for each in model.parameters() if is_first_copy(each))
        assert sum_over_ranks(sum(blocks)) == total
        assert own <= SHARE * total * num_copies / place.num_ranks
        assert_is(model, expected)
        assert {parameter.requires_grad for parameter in model.parameters()} == {dtype == torch.float32}
    dist.barrier()


@CASES.add
def checkpoint_files(place: Place) -> None:
    """Rank 0 alone reads the indices; each element is read by one rank, and a rank opens the files of its own parts."""
    config, directory = make_config(replicate=2), place.models / f"checkpoint-of-{place.num_ranks}"
    meshes = ParallelLayout.of(config, place.rank, place.num_ranks).meshes("cpu")
    policy = make_policy(ModelSpec(path=str(place.models / "qwen3")), config, meshes, CPU)[0]
    members = []
    for name, parameter in policy.named_parameters():
        settings = tensor_settings(SPEC, name, tuple(parameter.shape), in_layers=False)
        members.append(TrainedParameter(name=name, parameter=parameter, settings=settings))
    optimizer = Optimizer(members, SPEC, CPU)
    for parameter in policy.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step(1.0)
    if place.rank == 0:
        directory.mkdir()
    dist.barrier()
    checkpoint.save(directory, RankInfo(rank=place.rank, world_size=place.num_ranks), policy, optimizer, 7)
    saved = {name: local(parameter).detach().clone() for name, parameter in policy.named_parameters()}
    for parameter in policy.parameters():
        local(parameter).detach().zero_()
    dist.barrier()
    texts, blocks, opened = [], [], []
    real_text, real_open = Path.read_text, checkpoint.safe_open
    counted_text = mock.patch.object(Path, "read_text", lambda path, **given: texts.append(path) or real_text(path, **given))
    counted_open = mock.patch.object(
        checkpoint, "safe_open", lambda path, kind: opened.append(path.stem) or Counted(real_open(path, kind), blocks)
    )
    with counted_text, counted_open:
        assert checkpoint.load(directory, policy, optimizer) == (7, None)
    assert len(texts) == (place.num_ranks if place.rank == 0 else 0)
    for name, parameter in policy.named_parameters():
        assert torch.equal(local(parameter), saved[name]), name
    replicas = place.num_ranks // 2
    own = [] if place.rank >= replicas else [f"trainer-{place.rank:05d}"]
    assert opened == [f"trainer-{rank:05d}" for rank in range(place.num_ranks if place.rank == 0 else 0)] + own
    num_elements = sum(parameter.numel() for parameter in policy.parameters())
    assert sum_over_ranks(sum(blocks)) == 3 * num_elements, "weights and two moments"
    dist.barrier()


class Counted:
    """An open file that counts what is read of it."""

    def __init__(self, opened: Any, blocks: list[int]) -> None:
        self._opened, self._blocks = opened, blocks

    def __enter__(self) -> "Counted":
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.__exit__(*raised)

    def keys(self) -> Any:
        return self._file.keys()

    def get_slice(self, key: str) -> "Slice":
        return Slice(self._file.get_slice(key), self._blocks)


class Slice:
    """A tensor of such a file."""

    def __init__(self, real: Any, blocks: list[int]) -> None:
        self._real, self._blocks = real, blocks

    def get_shape(self) -> Any:
        return self._real.get_shape()

    def __getitem__(self, bounds: Any) -> Tensor:
        block = self._real[bounds]
        self._blocks.append(block.numel())
        return block


def sum_over_ranks(number: int) -> int:
    found = torch.tensor([number])
    dist.all_reduce(found)
    return int(found)


@CASES.add
def dense_parts(place: Place) -> None:
    for architecture in ARCHITECTURES:
        check_layout(place, architecture)


@CASES.add
def replicated_parts(place: Place) -> None:
    check_layout(place, "qwen2", replicate=2)


@CASES.add
def tensor_parallel_parts(place: Place) -> None:
    for architecture in ARCHITECTURES:
        check_layout(place, architecture, tensor_parallel=2)


@CASES.add
def expert_parallel_parts(place: Place) -> None:
    check_layout(place, "qwen3_moe", expert_parallel=2)
    if place.num_ranks == 4:
        check_layout(place, "qwen3_moe", expert_parallel=2, tensor_parallel=2)


@CASES.add
def parts_on_the_host(place: Place) -> None:
    check_layout(place, "qwen3", cpu_offload=True)


@CASES.add
def a_file_that_one_rank_cannot_read(place: Place) -> None:
    """Nobody waits for its part: every rank has its error at once."""
    config, spec = make_config(replicate=2), ModelSpec(path=str(place.models / "qwen2"))
    meshes = ParallelLayout.of(config, place.rank, place.num_ranks).meshes("cpu")

    def fail(*_: object) -> Any:
        raise ModelError([Problem(path="a-file", found="Input/output error", expected="a readable safetensors file")])

    last = place.num_ranks - 1
    for rank, failing in (
        (last, mock.patch.object(load, "open_tensors", fail)),
        (0, mock.patch.object(TensorFiles, "read", fail)),
    ):
        with failing if place.rank == rank else nullcontext(), pytest.raises(ModelError) as raised:
            make_policy(spec, config, meshes, CPU)
        assert [problem.path for problem in raised.value.problems] == ["a-file"]
    dist.barrier()

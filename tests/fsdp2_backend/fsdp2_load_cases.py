"""What each rank does in the tests of test_load that need several: reading its parts of a model's files."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fsdp2_group_cases import ARCHITECTURES, Cases, Place
from fsdp2_support import make_config
from torch import Tensor
from transformers import PreTrainedModel

from rlcore.spi import ModelSpec
from rlcore_fsdp2.export import whole
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.policy import make_policy, make_reference
from rlcore_fsdp2.sharding import local
from rlcore_torchkit.models import load_model
from rlcore_torchkit.safetensors_files import TensorFiles

CASES = Cases()
CPU = torch.device("cpu")
SHARE = 1.15
"""A rank's elements, relative to an equal share: some parameters do not divide evenly, and some are on every tensor rank."""


@contextmanager
def reading() -> Iterator[list[int]]:
    """How many elements each block has that is read of a file; nothing else loads a model."""
    found: list[int] = []
    read = TensorFiles.read

    def counted(files: TensorFiles, name: str, bounds: Sequence[slice]) -> Tensor:
        block = read(files, name, bounds)
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
    """A rank reads each element of its own parts once and no other."""
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
        assert sum(blocks) == own
        assert own <= SHARE * total * num_copies / place.num_ranks
        assert_is(model, expected)
        assert {parameter.requires_grad for parameter in model.parameters()} == {dtype == torch.float32}
    dist.barrier()


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

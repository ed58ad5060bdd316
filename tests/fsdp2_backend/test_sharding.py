"""What FSDP leaves on each rank, from every rank's place in turn; what it computes is compared in test_layout."""

from collections import Counter

import pytest
import torch
from fake_ranks import on_rank
from fsdp2_support import make_config
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlcore.spi import ModelSpec
from rlcore_fsdp2.experts import divide_experts
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.sharding import is_first_copy, local, num_copies, reshard, shard
from rlcore_fsdp2.tensor_parallel import parallelize
from rlcore_torchkit.huggingface.models import load_model

LAYOUTS = {
    "dp4": {"shard": 4},
    "hsdp2x2": {"replicate": 2, "shard": 2},
    "dp2xcp2": {"shard": 2, "context": 2},
    "dp2xtp2": {"shard": 2, "tensor": 2},
    "dp2xep2": {"shard": 2, "expert": 2},
    "hsdp2xep2": {"replicate": 2, "shard": 2, "expert": 2},
}


def sharded(directory, layout):
    """The model as this rank has it, on no device."""
    meshes = layout.meshes("cpu")
    model = load_model(ModelSpec(path=str(directory)), dtype=torch.float32, device="meta")
    if layout.tensor > 1:
        parallelize(model, meshes.tensor, sequence_parallel=True, experts=True)
    if layout.expert > 1:
        divide_experts(model, meshes.expert)
    shard(model, meshes, make_config(), ModelSpec(path=str(directory), dtype="bfloat16"))
    return model


@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_first_copies_of_all_ranks_are_the_model(sizes, model_directory):
    directory = model_directory("qwen3_moe", tied=False)
    whole = load_model(ModelSpec(path=str(directory)), dtype=torch.float32, device="meta")
    num_ranks = ParallelLayout(**sizes).world_size
    held, first, copies = Counter(), Counter(), {}
    for rank in range(num_ranks):
        with on_rank(rank, num_ranks):
            for name, parameter in sharded(directory, ParallelLayout(rank=rank, **sizes)).named_parameters():
                assert isinstance(parameter, DTensor)
                held[name] += local(parameter).numel()
                first[name] += local(parameter).numel() * is_first_copy(parameter)
                copies[name] = num_copies(parameter)
    assert first == {name: parameter.numel() for name, parameter in whole.named_parameters()}
    assert held == {name: copies[name] * number for name, number in first.items()}
    assert max(copies.values()) == sizes.get("replicate", 1) * sizes.get("tensor", 1), "norms are on every tensor rank"


def test_each_layer_is_gathered_by_itself(model_directory):
    with on_rank(0, 2):
        model = sharded(model_directory(), ParallelLayout(shard=2))
        groups = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        assert groups == {"", *(f"model.layers.{number}" for number in range(len(model.model.layers)))}


def test_what_was_gathered_is_freed_again(model_directory):
    with on_rank(0, 2):
        model = sharded(model_directory(), ParallelLayout(shard=2)).to_empty(device="cpu")
        parts = {name: local(parameter).numel() for name, parameter in model.named_parameters()}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        reshard(model)
        assert {name: local(parameter).numel() for name, parameter in model.named_parameters()} == parts
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_plain_tensor_is_its_own_only_copy():
    tensor = torch.ones(3)
    assert local(tensor) is tensor
    assert num_copies(tensor) == 1
    assert is_first_copy(tensor)

"""Experts divided over ranks on gloo; the cases are in fsdp2_experts_cases."""

import copy

import pytest
import torch
from fsdp2_experts_cases import CASES, NUM_EXPERTS, TOP_K, make_block
from fsdp2_group_cases import WORLD_SIZES, on_cuda, results_of

from rlcore_fsdp2.experts import divide_experts
from rlcore_fsdp2.layout import ParallelLayout


@pytest.mark.wide(keep=[f"{name}-4" for name in CASES])
@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_expert_ranks(name, num_ranks):
    for rank, results in enumerate(results_of(num_ranks, "fsdp2_experts_cases")):
        assert results[name] == "", f"rank {rank}:\n{results[name]}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_grouped_products_on_cuda():
    """On a group of one; the last two experts get no token."""
    generator = torch.Generator().manual_seed(0)
    weights, index = torch.rand(64, NUM_EXPERTS - 2, generator=generator).topk(TOP_K)
    states = torch.randn(64, 16, generator=generator)
    with on_cuda():
        model = make_block(intermediate=16).to("cuda", torch.bfloat16)
        modules = [copy.deepcopy(model.model.layers[0].mlp.experts)]
        divide_experts(model, ParallelLayout().meshes("cuda").ranks["shard"])
        modules.append(model.model.layers[0].mlp.experts)
        results = []
        for module in modules:
            inputs = states.to("cuda", torch.bfloat16).requires_grad_()
            output = module(inputs, index.cuda(), weights.to("cuda", torch.bfloat16))
            output.square().sum().backward()
            results.append([output, inputs.grad, *(parameter.grad for parameter in module.parameters())])
        for expected, found in zip(*results, strict=True):
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            assert (found - expected).norm() <= 0.02 * expected.norm()

"""Attention and log-probabilities over context ranks on gloo; the cases are in fsdp2_context_parallel_cases."""

import numpy as np
import pytest
import torch
from fsdp2_context_parallel_cases import CASES
from fsdp2_group_cases import WORLD_SIZES, on_cuda, results_of

from rlcore_fsdp2.context_parallel import ContextAttention
from rlcore_torchkit.forward.context_parallel import ContextPart
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.layers.packed_attention import packed_attention


@pytest.mark.wide(keep=[f"{name}-4" for name in CASES])
@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_context_ranks(name, num_ranks):
    for rank, results in enumerate(results_of(num_ranks, "fsdp2_context_parallel_cases")):
        assert results[name] == "", f"rank {rank}:\n{results[name]}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exchanged_heads_on_cuda(dtype):
    """On a group of one: what arrives are views of one tensor, which flash attention and its backward pass have to take."""
    packed = PackedSequences.from_offsets(np.array([0, 5, 6, 40]), "cuda")
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, 40, 64, generator=generator).to("cuda", dtype) for heads in (8, 2, 2)]
    results = []
    with on_cuda():
        context = ContextPart.of(packed, torch.distributed.group.WORLD)
        for among in (packed, ContextAttention(context)):
            inputs = [state.clone().requires_grad_() for state in states]
            output, _ = packed_attention(torch.nn.Identity(), *inputs, None, packed=among)
            output.square().sum().backward()
            results.append([output, *(state.grad for state in inputs)])
    for expected, found in zip(*results, strict=True):
        assert (found - expected).norm() <= 0.01 * expected.norm()

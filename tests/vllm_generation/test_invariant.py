"""What is put into vLLM, against the plain formulas; on CPU."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from rlcore_torchkit.testing.ranks import free_address, launch
from rlcore_vllm.ranks.invariant import apply_head, sum_first, sum_of_ranks


def test_the_residual_is_added_before_the_norm():
    random = torch.Generator().manual_seed(0)
    states, residual = (torch.randn(5, 8, generator=random).bfloat16() for _ in range(2))
    weight = torch.randn(8, generator=random).bfloat16()
    normed = sum_first(lambda input, weight, eps: F.rms_norm(input, weight.shape, weight, eps))
    found, total = normed(states, weight, 1e-6, residual=residual)
    assert torch.equal(total, states + residual)
    assert torch.equal(found, F.rms_norm(total, (8,), weight, 1e-6))
    assert torch.equal(normed(states, weight, 1e-6), F.rms_norm(states, (8,), weight, 1e-6))


def test_logits_are_in_float32_and_of_no_other_head():
    states, head = torch.randn(3, 8).bfloat16(), SimpleNamespace(weight=torch.randn(6, 8).bfloat16())
    processor = SimpleNamespace(head_dtype=torch.float32)
    logits = apply_head(processor, head, states, None)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), states.double() @ head.weight.double().T, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"torch\.bfloat16, a bias"):
        apply_head(SimpleNamespace(head_dtype=torch.bfloat16), head, states, torch.zeros(6))


def test_ranks_products_are_added_in_the_order_of_ranks():
    launch(check_sum, (free_address(),), 3, timeout_s=120)


def check_sum(rank, address):
    """On each of three of vLLM's tensor ranks."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    products = torch.randn(3, 50, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(3, rank, address, rank, "gloo")
        initialize_model_parallel(3)
    total = sum_of_ranks(products[rank])
    assert torch.equal(total, (products[0] + products[1]) + products[2])
    assert not torch.equal(total, products[0] + (products[1] + products[2]))

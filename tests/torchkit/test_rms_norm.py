"""The fused norm against each model's own."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from rlcore_torchkit.layers.rms_norm import FusedRMSNorm, fuse_norms, rms_norm


@pytest.mark.parametrize("norm", [LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-1), (torch.float64, 1e-6)])
def test_output_and_gradients_equal_those_of_the_model(norm, dtype, tolerance):
    torch.manual_seed(0)
    input = torch.randn(1, 5, 4, 16, dtype=dtype)
    results = []
    for fuse in (False, True):
        model = nn.Sequential(norm(16, eps=1e-5)).to(dtype)
        nn.init.normal_(model[0].weight, 1.0, 0.3, generator=torch.Generator().manual_seed(1))
        names = list(model.state_dict())
        if fuse:
            fuse_norms(model)
        assert isinstance(model[0], FusedRMSNorm) == fuse
        assert list(model.state_dict()) == names
        leaf = input.clone().requires_grad_()
        output = model(leaf)
        output.pow(2).sum().backward()
        results.append([output, leaf.grad, model[0].weight.grad])
    for found, expected in zip(*reversed(results), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_other_modules_are_left_alone():
    model = nn.Sequential(nn.RMSNorm(4), nn.LayerNorm(4))
    fuse_norms(model)
    assert [type(module) for module in model] == [nn.RMSNorm, nn.LayerNorm]


@pytest.mark.parametrize("shape", [(1, 16), (7, 4, 16), (300, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_without_a_gradient_it_is_that_of_float64(shape, dtype, tolerance):
    generator = torch.Generator().manual_seed(2)
    rows, weight = (torch.randn(size, generator=generator).to(dtype) for size in (shape, (16,)))
    rows[0] *= 1e-4  # where epsilon counts
    exact = rows.double()
    expected = weight.double() * exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    before = rows.clone()
    found = rms_norm(rows, weight, 1e-5)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("shape", [(1, 16), (2, 7, 4, 16), (300, 16), (0, 16)])
@pytest.mark.parametrize("needs_rows", [True, False])
@pytest.mark.parametrize("needs_weight", [True, False])
def test_float32_on_cpu_has_the_gradients_of_float64(shape, needs_rows, needs_weight):
    generator = torch.Generator().manual_seed(3)
    rows, weight, upstream = (torch.randn(size, generator=generator) for size in (shape, (16,), shape))
    rows[:1] *= 1e-4  # where epsilon counts
    results = []
    for dtype in (torch.float32, torch.float64):
        norm = FusedRMSNorm()
        norm.weight, norm.variance_epsilon = nn.Parameter(weight.to(dtype), requires_grad=needs_weight), 1e-5
        leaf = rows.to(dtype, copy=True).requires_grad_(needs_rows)
        output = norm(leaf)
        if output.requires_grad:
            output.backward(upstream.to(dtype))
        results.append([leaf.grad, norm.weight.grad])
    for found, expected, wanted in zip(*results, (needs_rows, needs_weight), strict=True):
        assert (found is not None) == wanted
        if wanted:
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype", "autocast"),
    [((16,), torch.float32, False), ((3, 16), torch.bfloat16, False), ((3, 16), torch.float32, True)],
    ids=["one row", "weights in bfloat16", "autocast"],
)
def test_float32_rows_on_cpu_have_gradients_whatever_surrounds_them(shape, dtype, autocast):
    generator = torch.Generator().manual_seed(4)
    norm = FusedRMSNorm()
    norm.weight, norm.variance_epsilon = nn.Parameter(torch.randn(16, generator=generator).to(dtype)), 1e-5
    rows = torch.randn(shape, generator=generator).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        norm(rows).square().sum().backward()
    exact, weight = (part.detach().double().requires_grad_() for part in (rows, norm.weight))
    (weight * exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt()).square().sum().backward()
    assert (rows.grad.dtype, norm.weight.grad.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(rows.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.weight.grad.double(), weight.grad, rtol=1e-2, atol=1e-2)

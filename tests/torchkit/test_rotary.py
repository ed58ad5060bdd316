"""Rotary positions by fewer operations, against those of each model."""

import pytest
import torch
from torch import nn
from transformers.models.glm import modeling_glm
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from rlcore_torchkit.layers.rotary import ROTATE, fuse_rotary

FAMILIES = {
    "llama": (modeling_llama, modeling_llama.LlamaAttention),
    "mistral": (modeling_mistral, modeling_mistral.MistralAttention),
    "qwen2": (modeling_qwen2, modeling_qwen2.Qwen2Attention),
    "qwen3": (modeling_qwen3, modeling_qwen3.Qwen3Attention),
    "qwen3_moe": (modeling_qwen3_moe, modeling_qwen3_moe.Qwen3MoeAttention),
}


def rotating(kind):
    """Return the function that a fused module of this kind calls."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    fuse_rotary(module)
    return type(module).forward.__globals__[ROTATE]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "is_fused"), [(torch.float32, True), (torch.float64, False), (torch.bfloat16, False)])
def test_output_and_gradients_equal_those_of_the_model(family, dtype, is_fused):
    modeling, kind = FAMILIES[family]
    generator = torch.Generator().manual_seed(0)
    query, key, *upstream = (torch.randn(1, heads, 7, 8, generator=generator).to(dtype) for heads in (4, 2, 4, 2))
    cos, sin = (torch.randn(1, 7, 8, generator=generator).to(dtype) for _ in range(2))
    fused = rotating(kind)
    assert fused is not getattr(modeling, ROTATE), "the module of transformers is left as it is"
    results = []
    for rotate in (fused, getattr(modeling, ROTATE)):
        leaves = [heads.clone().requires_grad_() for heads in (query, key)]
        found = rotate(*leaves, cos, sin)
        torch.autograd.backward(found, upstream)
        results.append([*found, *(leaf.grad for leaf in leaves)])
    assert [("Rotation" in found.grad_fn.name()) for found in results[0][:2]] == [is_fused] * 2
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [modeling_glm.GlmAttention, modeling_qwen3.Qwen3MLP, nn.Linear])
def test_modules_of_another_form_are_left_alone(kind):
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    fuse_rotary(module)
    assert type(module) is kind


@pytest.mark.parametrize(
    ("modeling", "kind", "width", "options", "learns"),
    [
        (modeling_phi3, modeling_phi3.Phi3Attention, 4, {}, False),
        (modeling_qwen3, modeling_qwen3.Qwen3Attention, 8, {"unsqueeze_dim": 1}, False),
        (modeling_qwen3, modeling_qwen3.Qwen3Attention, 8, {}, True),
    ],
    ids=["angles for half of each head", "an option by its name", "angles with gradients"],
)
def test_what_the_fused_operations_cannot_do_is_the_models_own(modeling, kind, width, options, learns):
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(1, heads, 7, 8, generator=generator) for heads in (4, 2))
    angles = [torch.randn(1, 7, width, generator=generator) for _ in range(2)]
    results = []
    for rotate in (rotating(kind), getattr(modeling, ROTATE)):
        leaves = [part.clone().requires_grad_(learns) for part in angles]
        found = rotate(query, key, *leaves, **options)
        if learns:
            sum(part.sum() for part in found).backward()
        results.append([*found, *(leaf.grad for leaf in leaves if learns)])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)

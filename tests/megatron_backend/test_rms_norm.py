"""The norm against its formula in float64."""

from types import SimpleNamespace

import pytest
import torch

from rlcore_megatron.modules import rms_norm
from rlcore_megatron.modules.rms_norm import KeyNorm, OutputNorm, PlainRMSNorm, QueryNorm, WideNorm
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu


@pytest.mark.parametrize("is_divided", [False, True])
def test_it_is_the_formula_and_marked_as_sequence_parallelism_wants(is_divided: bool) -> None:
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=is_divided, layernorm_zero_centered_gamma=False)
    norm = PlainRMSNorm(config, 8, eps=1e-3, name="what else Megatron passes")
    torch.nn.init.normal_(norm.weight)
    rows = torch.randn(5, 8)
    wide = rows.double()
    expected = norm.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(rows).double(), expected, atol=1e-6, rtol=1e-6)
    assert norm.weight.sequence_parallel is is_divided


def test_zero_centred_weights_and_the_norm_behind_a_module_are_the_formulas() -> None:
    """Rounded once, behind the product with the weights."""
    config = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False, layernorm_zero_centered_gamma=True)
    norm = OutputNorm(config, 8, eps=1e-3)
    torch.nn.init.normal_(norm.weight, std=0.1)
    rows, residual = torch.randn(5, 8).bfloat16(), torch.randn(5, 8)
    wide = rows.double()
    expected = (1.0 + norm.weight.double()) * wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    found = norm(True, False)((rows, None), residual, 0.0) - residual
    torch.testing.assert_close(found, expected.bfloat16().float(), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize(("norm_class", "num_heads"), [(QueryNorm, 4), (KeyNorm, 2)])
def test_a_norm_over_all_heads_is_the_formula(
    norm_class: type[WideNorm], num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the second of two tensor ranks, which has half of the heads, as the first has the same."""
    config = SimpleNamespace(params_dtype=torch.float32, num_attention_heads=4, num_query_groups=2)
    monkeypatch.setattr(rms_norm, "reduce_from_tensor_model_parallel_region", lambda squares: 2 * squares)
    monkeypatch.setattr(rms_norm, "copy_to_tensor_model_parallel_region", lambda squares: squares)
    monkeypatch.setattr(rms_norm, "get_tensor_model_parallel_rank", lambda: 1)
    with cuda_or_cpu():
        norm = norm_class(config, 8, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    states = torch.randn(5, 1, num_heads // 2, 8)
    wide = states.flatten(-2).double()
    expected = norm.weight[num_heads * 4 :].double() * wide / (wide.square().mean(-1)[..., None] + 1e-3).sqrt()
    torch.testing.assert_close(norm(states).flatten(-2).double(), expected, atol=1e-6, rtol=1e-6)

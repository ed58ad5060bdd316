"""The norm against its formula in float64."""

from types import SimpleNamespace

import pytest
import torch

from rlcore_megatron.rms_norm import PlainRMSNorm


@pytest.mark.parametrize("is_divided", [False, True])
def test_it_is_the_formula_and_marked_as_sequence_parallelism_wants(is_divided: bool) -> None:
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=is_divided)
    norm = PlainRMSNorm(config, 8, eps=1e-3, name="what else Megatron passes")
    torch.nn.init.normal_(norm.weight)
    rows = torch.randn(5, 8)
    wide = rows.double()
    expected = norm.weight.double() * wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(rows).double(), expected, atol=1e-6, rtol=1e-6)
    assert norm.weight.sequence_parallel is is_divided

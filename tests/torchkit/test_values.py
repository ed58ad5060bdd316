"""Values by the head's weight, and the gradients that several ranks send back."""

import itertools

import pytest
import torch

from rlcore.spi import ModelSpec
from rlcore_torchkit.head.values import has_value_head, packed_values, patch_value_head, shared_by, token_values
from rlcore_torchkit.huggingface.models import load_model
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.testing.models import make_model

TOKENS, OFFSETS = torch.tensor([5, 9, 2, 7, 7, 3]), torch.tensor([0, 1, 4, 6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_taken_in_float32_whatever_the_hidden_states_are(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in ((40, 64), (1, 64)))
    found = token_values(hidden, weight)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), (hidden.double() @ weight.double().T)[:, 0], rtol=0, atol=1e-5)


def test_each_of_several_ranks_sends_back_its_share_of_a_gradient():
    hidden = torch.randn(3, 4, requires_grad=True)
    (shared_by(hidden * 2.0, 4) * torch.arange(4.0)).sum().backward()
    torch.testing.assert_close(hidden.grad, (2.0 * torch.arange(4.0) / 4).expand(3, 4))
    assert not shared_by(torch.ones(2, 2), 4).requires_grad


def test_a_packed_sequence_has_the_values_that_it_has_alone(tmp_path):
    path = make_model(tmp_path / "model", "qwen3", head="value")
    model = load_model(ModelSpec(path=str(path)), dtype=torch.float32, head="value")
    assert has_value_head(model)
    patch_value_head(model)
    with torch.no_grad():
        found = packed_values(model, TOKENS, PackedSequences.from_offsets(OFFSETS, "cpu"))
        for start, end in itertools.pairwise(OFFSETS):
            alone = packed_values(model, TOKENS[start:end], PackedSequences.from_offsets(torch.tensor([0, end - start]), "cpu"))
            torch.testing.assert_close(found[start:end], alone, rtol=0, atol=1e-6)

"""TransformerEngine multiplies by all experts in one kernel on Hopper, and gets at least one token."""

import os

import pytest
import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP

from rlcore_megatron.modules.grouped_products import VARIABLE, GroupedExperts, multiply_by_all_experts_at_once


@pytest.mark.parametrize(
    ("capability", "found", "expected"),
    [((9, 0), None, "1"), ((9, 0), "0", "0"), ((8, 0), None, None), ((10, 0), None, None)],
)
def test_one_kernel_on_hopper(monkeypatch, capability, found, expected):
    monkeypatch.delenv(VARIABLE, raising=False)
    if found is not None:
        monkeypatch.setenv(VARIABLE, found)
    multiply_by_all_experts_at_once(capability)
    assert os.environ.get(VARIABLE) == expected
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize("counts", [(0, 0), (0, 3), (2, 1)])
def test_experts_without_a_token_get_one_of_zeros(monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int]) -> None:
    """The outputs are those of the tokens alone, and a rank without tokens adds zeros to every gradient."""
    weights = torch.ones(2, 4, 4, requires_grad=True)

    def grouped(_: object, states: torch.Tensor, found: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert len(states) == len(probs) == found.sum() > 0
        rows = zip(states.split(found.tolist()), probs.split(found.tolist()), weights, strict=True)
        return torch.cat([(part @ weight) * share[:, None] for part, share, weight in rows]), None

    monkeypatch.setattr(TEGroupedMLP, "forward", grouped)
    experts = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(experts)
    experts.input_size = 4
    states = torch.ones(sum(counts), 4, requires_grad=True)
    tokens_per_expert = torch.tensor(counts)
    output, bias = experts.forward(states, tokens_per_expert, torch.ones(sum(counts)))
    assert output.shape == states.shape
    assert bias is None
    assert tokens_per_expert.tolist() == list(counts)
    output.sum().backward()
    assert states.grad is not None
    assert [float(gradient.sum()) for gradient in weights.grad] == [16.0 * count for count in counts]

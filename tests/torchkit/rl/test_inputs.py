"""Losses see nothing outside the mask, and are told where what they compare with is missing."""

from typing import Any

import pytest
import torch

from rlcore.spi import ContractError, GlobalCounts, LossInputs
from rlcore_torchkit.rl.policy_gradient import previous_logprobs
from rlcore_torchkit.rl.sequences import masked

MASK = torch.tensor([False, True, True])


def inputs_with(previous: torch.Tensor | None) -> LossInputs:
    given: dict[str, Any] = {"entropy": None, "token_columns": {}, "sequence_columns": {}, "previous_logprobs": previous}
    counts = GlobalCounts(num_loss_tokens=2, num_loss_sequences=1)
    return LossInputs(logprobs=torch.zeros(3), loss_mask=MASK, offsets=torch.tensor([0, 3]), counts=counts, **given)


def test_nothing_outside_the_mask_reaches_value_or_gradient() -> None:
    values = torch.tensor([float("nan"), 1.0, 2.0], requires_grad=True)
    kept = masked(values, inputs_with(None))
    assert kept.tolist() == [0.0, 1.0, 2.0]
    (gradient,) = torch.autograd.grad(kept.square().sum(), values)
    assert gradient.tolist() == [0.0, 2.0, 4.0]


def test_the_generators_or_the_trainers_are_compared_with() -> None:
    generation, trainer = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([float("nan"), -3.0, -4.0])
    assert previous_logprobs(inputs_with(trainer), generation, "generation") is generation
    assert previous_logprobs(inputs_with(trainer), generation, "trainer").tolist() == [0.0, -3.0, -4.0]
    with pytest.raises(ContractError, match="no previous_logprobs"):
        previous_logprobs(inputs_with(None), generation, "trainer")

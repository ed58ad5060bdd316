"""The loss of rewards against float64 numpy written from the formula, TRL's numbers, and any cut into microbatches."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import MARGINS, ContractError, GlobalCounts, LossInputs
from rlcore.spi.arrays import offsets_of
from rlcore_reward_model.config import RewardConfig
from rlcore_reward_model.loss import reward_loss

NUMBERS = json.loads(Path(__file__).with_name("trl_numbers.json").read_text())
LENGTHS = (3, 4, 2, 2, 5, 7, 1, 6, 3, 3)
"""Five pairs."""


def inputs_of(values, lengths, counts, masked=()):
    """Values float64 [T]; the loss mask is on each sequence's last token, but for the pairs `masked`."""
    offsets = offsets_of(lengths)
    mask = np.zeros(offsets[-1], np.bool_)
    mask[offsets[1:] - 1] = True
    for pair in masked:
        mask[offsets[2 * pair] : offsets[2 * pair + 2]] = False
    return LossInputs(
        logprobs=torch.zeros_like(values),
        entropy=None,
        loss_mask=torch.tensor(mask),
        offsets=torch.tensor(offsets),
        token_columns={},
        sequence_columns={},
        counts=GlobalCounts(num_loss_tokens=1, num_loss_sequences=counts),
        values=values,
    )


def reference(rewards, coefficient):
    """The formula, float64, of pairs of rewards [P, 2]."""
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    return float((np.log1p(np.exp(rejected - chosen)) + coefficient * (chosen + rejected) ** 2).mean())


def random_values(seed):
    return np.random.default_rng(seed).normal(0.0, 1.5, sum(LENGTHS))


@pytest.mark.parametrize("coefficient", [0.0, 0.4])
def test_loss_and_gradient_are_the_formulas(coefficient):
    values, lasts = random_values(0), offsets_of(LENGTHS)[1:] - 1
    leaf = torch.tensor(values, requires_grad=True)
    config = RewardConfig(center_rewards_coefficient=coefficient)
    output = reward_loss(inputs_of(leaf, LENGTHS, 10), config)
    output.loss.backward()
    assert float(output.loss) == pytest.approx(reference(values[lasts].reshape(-1, 2), coefficient), rel=1e-12)
    found = leaf.grad.numpy()
    assert not np.delete(found, lasts).any()
    for place in lasts:
        moved = [values + step * (np.arange(len(values)) == place) for step in (1e-5, -1e-5)]
        losses = [reference(each[lasts].reshape(-1, 2), coefficient) for each in moved]
        assert found[place] == pytest.approx((losses[0] - losses[1]) / 2e-5, abs=1e-8)


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=lambda case: str(case["center_rewards_coefficient"]))
def test_the_loss_is_trls(case):
    rewards = np.stack([NUMBERS["chosen"], NUMBERS["rejected"]], 1).reshape(-1)
    leaf = torch.tensor(rewards, requires_grad=True)
    config = RewardConfig(center_rewards_coefficient=case["center_rewards_coefficient"] or 0.0)
    output = reward_loss(inputs_of(leaf, [1] * len(rewards), len(rewards)), config)
    output.loss.backward()
    assert float(output.loss) == pytest.approx(case["loss"], rel=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy().reshape(-1, 2).T.reshape(-1), case["gradients"], rtol=0, atol=1e-12)
    assert float(output.sums["rewards/accuracies"]) == pytest.approx(case["accuracy"])
    assert float(output.sums["rewards/margins"]) == pytest.approx(case["margin"])


def test_a_margin_is_taken_off_the_difference_and_off_no_figure():
    """TRL 1.16 and Llama 2: -log σ(r_chosen - r_rejected - m)."""
    values, lasts = random_values(2), offsets_of(LENGTHS)[1:] - 1
    margins = np.array([0.0, 1.5, -0.5, 3.0, 0.25])
    leaf = torch.tensor(values, requires_grad=True)
    inputs = inputs_of(leaf, LENGTHS, 10)
    output = reward_loss(evolve(inputs, sequence_columns={MARGINS: torch.tensor(np.repeat(margins, 2))}), RewardConfig())
    output.loss.backward()
    pairs = values[lasts].reshape(-1, 2)
    difference = pairs[:, 0] - pairs[:, 1]
    assert float(output.loss) == pytest.approx(np.log1p(np.exp(margins - difference)).mean(), rel=1e-12)
    expected = -1 / (1 + np.exp(difference - margins)) / 5
    np.testing.assert_allclose(leaf.grad.numpy()[lasts].reshape(-1, 2), np.stack([expected, -expected], 1), atol=1e-12)
    assert float(output.sums["rewards/margins"]) == pytest.approx(difference.mean())


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(5)), cuts=st.sets(st.integers(1, 4)))
def test_any_cut_into_whole_pairs_has_the_same_loss_and_metrics(order, cuts):
    values, offsets = random_values(1), offsets_of(LENGTHS)
    whole = reward_loss(inputs_of(torch.tensor(values, requires_grad=True), LENGTHS, 10), RewardConfig())
    totals = {"loss": 0.0, **dict.fromkeys(whole.sums, 0.0)}
    bounds = [0, *sorted(cuts), 5]
    for start, end in pairwise(bounds):
        pairs = order[start:end]
        part = np.concatenate([values[offsets[2 * pair] : offsets[2 * pair + 2]] for pair in pairs])
        lengths = [length for pair in pairs for length in LENGTHS[2 * pair : 2 * pair + 2]]
        output = reward_loss(inputs_of(torch.tensor(part, requires_grad=True), lengths, 10), RewardConfig())
        for name, value in {"loss": output.loss, **output.sums}.items():
            totals[name] += float(value)
    assert totals == pytest.approx({"loss": float(whole.loss), **{name: float(v) for name, v in whole.sums.items()}})


def test_what_fills_an_empty_microbatch_counts_nothing():
    leaf = torch.tensor(random_values(2), requires_grad=True)
    some = reward_loss(inputs_of(leaf, LENGTHS, 8, masked=(1,)), RewardConfig(center_rewards_coefficient=0.1))
    some.loss.backward()
    offsets = offsets_of(LENGTHS)
    assert not leaf.grad[offsets[2] : offsets[4]].any()
    rewards = np.delete(random_values(2)[offsets[1:] - 1].reshape(-1, 2), 1, 0)
    assert float(some.loss) == pytest.approx(reference(rewards, 0.1))
    assert float(some.sums["rewards/chosen"]) == pytest.approx(rewards[:, 0].mean())


def test_half_pairs_and_trainers_without_values_are_refused():
    values = torch.zeros(6, requires_grad=True)
    with pytest.raises(ContractError, match="expected pairs"):
        reward_loss(inputs_of(values, [2, 2, 2], 2), RewardConfig())
    with pytest.raises(ContractError, match="no values"):
        reward_loss(evolve(inputs_of(values, [3, 3], 2), values=None), RewardConfig())

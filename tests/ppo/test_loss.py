"""Both losses against the formulas, token by token in float64, and their gradients against finite differences."""

import math

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, VALUES, ContractError, GlobalCounts, LossInputs
from rlcore_ppo.config import PpoConfig
from rlcore_ppo.loss import RETURNS, critic_loss, policy_loss
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS

TRAINER = {"previous_logprobs": "trainer"}
OPTIONS = [
    {"previous_logprobs": "generation"},
    {**TRAINER, "importance_maximum": 1.1},
    {**TRAINER, "importance_correction": "none", "clip_low": 0.1, "clip_high": 0.4, "dual_clip": 1.5},
    {**TRAINER, "loss_normalisation": "sequence", "entropy_coefficient": 0.05},
    {**TRAINER, "likelihood_coefficient": 0.1},
]


def draw(seed, lengths):
    """Arrays [T] by name, of sequences of these lengths."""
    random = np.random.default_rng(seed)
    size, offsets = sum(lengths), np.cumsum([0, *lengths])
    mask = random.random(size) < 0.7
    mask[offsets[:-1]] = False
    generation = -random.exponential(1.5, size)
    values = random.normal(0, 1, size)
    return {
        "offsets": offsets,
        "mask": mask,
        "generation": generation,
        "previous": generation + random.normal(0, 0.3, size),
        "current": generation + random.normal(0, 0.4, size),
        "entropy": random.exponential(1, size),
        "advantages": np.where(mask, random.normal(0, 1.5, size), 0),
        "values": values,
        "old_values": values + random.normal(0, 0.4, size),
        "returns": np.where(mask, random.normal(0, 1.5, size), 0),
        "likelihood": np.where(mask & (np.repeat(np.arange(len(lengths)), lengths) % 2 == 0), 1.7, 0),
    }


def inputs_of(data, sequences=None, counts=None):
    """LossInputs of some of the sequences, whose leaves are logprobs and values."""
    offsets, mask = data["offsets"], data["mask"]
    sequences = list(range(len(offsets) - 1)) if sequences is None else sequences
    taken = np.concatenate([np.arange(offsets[n], offsets[n + 1]) for n in sequences])
    tensors = {name: torch.tensor(array[taken]) for name, array in data.items() if name != "offsets"}
    lengths = np.array([mask[offsets[n] : offsets[n + 1]].sum() for n in range(len(offsets) - 1)])
    return LossInputs(
        logprobs=tensors["current"].requires_grad_(),
        values=tensors["values"].requires_grad_(),
        entropy=tensors["entropy"],
        loss_mask=tensors["mask"],
        offsets=torch.tensor(np.cumsum([0, *np.diff(offsets)[sequences]])),
        token_columns={
            GENERATION_LOGPROBS: tensors["generation"],
            ADVANTAGES: tensors["advantages"],
            VALUES: tensors["old_values"],
            RETURNS: tensors["returns"],
            LIKELIHOOD_WEIGHTS: tensors["likelihood"],
        },
        sequence_columns={},
        counts=counts or GlobalCounts(num_loss_tokens=int(mask.sum()), num_loss_sequences=int((lengths > 0).sum())),
        previous_logprobs=tensors["previous"],
    )


def policy_reference(data, config):
    """PPO's clipped loss (arXiv:1707.06347, equation 7), each token weighed by min(trainer / generator, maximum)."""
    offsets, total = data["offsets"], 0.0
    spans = [range(offsets[n], offsets[n + 1]) for n in range(len(offsets) - 1)]
    num_sequences = sum(any(data["mask"][t] for t in span) for span in spans)
    for span in spans:
        steps = [t for t in span if data["mask"][t]]
        for t in steps:
            from_trainer = config.previous_logprobs == "trainer"
            before = data["previous"][t] if from_trainer else data["generation"][t]
            ratio, advantage = math.exp(data["current"][t] - before), data["advantages"][t]
            gain = min(ratio * advantage, min(max(ratio, 1 - config.clip_low), 1 + config.clip_high) * advantage)
            if config.dual_clip is not None and advantage < 0:
                gain = max(gain, config.dual_clip * advantage)
            if from_trainer and config.importance_correction == "token":
                gain *= min(math.exp(before - data["generation"][t]), config.importance_maximum)
            gain += config.entropy_coefficient * data["entropy"][t]
            by_sequence = config.loss_normalisation == "sequence"
            total -= gain / (len(steps) * num_sequences if by_sequence else data["mask"].sum())
            total -= config.likelihood_coefficient * data["likelihood"][t] * data["current"][t] / data["mask"].sum()
    return total


def critic_reference(data, clip):
    """½ max of the plain and the clipped squared error of the value before each token (arXiv:2005.12729)."""
    total = 0.0
    for t in np.flatnonzero(data["mask"]):
        value, old, target = data["values"][t - 1], data["old_values"][t - 1], data["returns"][t]
        bounded = min(max(value, old - clip), old + clip)
        total += 0.5 * max((value - target) ** 2, (bounded - target) ** 2)
    return total / data["mask"].sum()


def numeric_gradient(function, data, name, step=1e-6):
    gradient = np.zeros(len(data[name]))
    for t in range(len(gradient)):
        up, down = ({**data, name: data[name] + sign * step * (np.arange(len(gradient)) == t)} for sign in (1, -1))
        gradient[t] = (function(up) - function(down)) / (2 * step)
    return gradient


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_policys_loss_is_that_of_the_formula(options):
    data, config = draw(1, [5, 1, 8, 4]), PpoConfig(**options)
    inputs = inputs_of(data)
    output = policy_loss(inputs, config)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(policy_reference(data, config), rel=1e-9)
    expected = numeric_gradient(lambda moved: policy_reference(moved, config), data, "current")
    np.testing.assert_allclose(inputs.logprobs.grad, expected, rtol=1e-5, atol=1e-8)
    assert output.sums["entropy"].item() == pytest.approx(data["entropy"][data["mask"]].mean(), rel=1e-6)


@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_the_critics_loss_is_of_the_values_before_each_token(clip):
    data, config = draw(2, [5, 1, 8, 4]), PpoConfig(value_clip=clip)
    inputs = inputs_of(data)
    output = critic_loss(inputs, config)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(critic_reference(data, clip), rel=1e-9)
    expected = numeric_gradient(lambda moved: critic_reference(moved, clip), data, "values")
    np.testing.assert_allclose(inputs.values.grad, expected, rtol=1e-5, atol=1e-8)
    assert (output.sums["clip_fraction"].item() > 0) == (clip < math.inf)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.lists(st.integers(1, 6), min_size=2, max_size=6), st.data())
def test_no_cut_into_microbatches_changes_either(seed, lengths, data):
    drawn, config = draw(seed, lengths), PpoConfig(**OPTIONS[3])
    cut = data.draw(st.integers(1, len(lengths) - 1))
    whole = inputs_of(drawn)
    parts = [inputs_of(drawn, list(rows), whole.counts) for rows in (range(cut), range(cut, len(lengths)))]
    for loss in (policy_loss, critic_loss):
        expected, outputs = loss(whole, config), [loss(part, config) for part in parts]
        assert sum(output.loss.item() for output in outputs) == pytest.approx(expected.loss.item(), rel=1e-6, abs=1e-9)
        for name, total in expected.sums.items():
            assert sum(output.sums[name].item() for output in outputs) == pytest.approx(total.item(), rel=1e-5, abs=1e-7)


def test_what_a_trainer_does_not_give_is_no_zero():
    inputs = inputs_of(draw(3, [4, 4]))
    with pytest.raises(ContractError, match="values"):
        critic_loss(evolve(inputs, values=None), PpoConfig())
    with pytest.raises(ContractError, match="previous_logprobs"):
        policy_loss(evolve(inputs, previous_logprobs=None), PpoConfig(**TRAINER))

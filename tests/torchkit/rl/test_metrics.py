"""Metrics of a microbatch against their definitions in float64 numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import GlobalCounts
from rlcore.spi.loss import MISMATCH_METRICS
from rlcore_torchkit.rl.policy_gradient import (
    clipped_objective,
    sequence_maxima,
    sequence_mismatch,
)
from rlcore_torchkit.rl.sequences import MaskedMean, Sequences
from rlcore_torchkit.trainer.losses import mismatch

SIZE = 40


def draw(seed):
    """A mask with at least one token, and the log-probabilities of trainer and generator, nan outside it."""
    random = np.random.default_rng(seed)
    mask = random.random(SIZE) < 0.6
    mask[random.integers(SIZE)] = True
    trainer = np.where(mask, -random.exponential(2.0, SIZE), np.nan)
    return mask, trainer, trainer + random.normal(0, 0.5, SIZE)


def mean_over(mask, num_loss_tokens=None):
    count = int(mask.sum()) if num_loss_tokens is None else num_loss_tokens
    return MaskedMean(torch.tensor(mask), GlobalCounts(num_loss_tokens=count, num_loss_sequences=1))


def test_a_mean_takes_the_masked_tokens_of_all_microbatches_into_account():
    values = torch.tensor([1.0, np.nan, 4.0], requires_grad=True)
    mean = mean_over(np.array([True, False, True]), num_loss_tokens=10)
    assert mean(values).item() == pytest.approx(0.5)
    assert not mean(values).requires_grad
    assert mean(torch.tensor([True, True, False])).item() == pytest.approx(0.1)
    nothing = mean_over(np.zeros(3, bool), num_loss_tokens=0)
    assert nothing(values).item() == 0.0


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6))
def test_the_mismatch_is_that_of_its_definitions(seed):
    mask, trainer, generation = draw(seed)
    found = mismatch(torch.tensor(trainer), torch.tensor(generation), mean_over(mask))
    delta = (trainer - generation)[mask]
    expected = {
        "token_mult_prob_error": np.exp(np.abs(delta)).mean(),
        "generation_kl_error": (np.exp(delta) - 1 - delta).mean(),
        "importance_ratio": np.exp(delta).mean(),
    }
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-5)
    assert found.keys() == {*MISMATCH_METRICS}


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), cut=st.integers(1, SIZE - 1))
def test_the_mismatch_of_microbatches_adds_up(seed, cut):
    mask, trainer, generation = draw(seed)
    whole = mismatch(torch.tensor(trainer), torch.tensor(generation), mean_over(mask))
    parts = [
        mismatch(torch.tensor(trainer[part]), torch.tensor(generation[part]), mean_over(mask[part], int(mask.sum())))
        for part in (slice(cut), slice(cut, SIZE))
    ]
    for name, value in whole.items():
        assert sum(part[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-5, abs=1e-7)


def test_equal_log_probabilities_have_no_mismatch():
    mask, trainer, _ = draw(0)
    found = mismatch(torch.tensor(trainer, requires_grad=True), torch.tensor(trainer), mean_over(mask))
    assert {name: value.item() for name, value in found.items()} == pytest.approx(
        {"token_mult_prob_error": 1.0, "generation_kl_error": 0.0, "importance_ratio": 1.0}
    )
    assert not any(value.requires_grad for value in found.values())


@pytest.mark.parametrize("nats", [200.0, -200.0])
def test_weights_that_have_nothing_in_common_are_told_by_a_finite_figure(nats):
    """An infinite one would hide what is wrong."""
    found = mismatch(torch.zeros(3), torch.full((3,), nats), mean_over(np.ones(3, bool)))
    assert all(value.isfinite() for value in found.values())
    assert found["token_mult_prob_error"] > 1e6


def test_the_objectives_figures_count_what_the_clips_bind():
    mask, trainer, previous = draw(1)
    advantages = np.where(np.arange(SIZE) % 2, 1.5, -0.5)
    ratio = np.exp(trainer - previous)
    low, high = (advantages < 0) & (ratio < 0.9), (advantages > 0) & (ratio > 1.2)
    objective = clipped_objective(
        torch.tensor(trainer - previous), torch.tensor(advantages), clip_low=0.1, clip_high=0.2, dual_clip=1.3
    )
    found = objective.means(mean_over(mask))
    expected = {
        "ratio_mean": ratio[mask].mean(),
        "clip_fraction": (low | high)[mask].mean(),
        "clip_fraction_low": low[mask].mean(),
        "clip_fraction_high": high[mask].mean(),
        "dual_clip_fraction": ((advantages < 0) & (ratio > 1.3))[mask].mean(),
    }
    assert min(expected.values()) > 0, "each figure is put to the test"
    assert {name: value.item() for name, value in found.items()} == pytest.approx(expected, rel=1e-5)
    maxima = objective.maxima(torch.tensor(mask))
    assert maxima["ratio_max"].item() == pytest.approx(ratio[mask].max())
    assert objective.maxima(torch.zeros(SIZE, dtype=torch.bool))["ratio_max"].item() == 0.0


def test_the_mismatch_of_sequences_adds_up_over_those_of_the_step():
    delta = torch.tensor([9.0, 0.4, -0.2, 9.0, -0.6, 9.0], requires_grad=True)
    sequences = Sequences(torch.tensor([False, True, True, False, True, False]), torch.tensor([0, 3, 5, 6]))
    counts = GlobalCounts(num_loss_tokens=9, num_loss_sequences=4)
    found = sequence_mismatch(delta, torch.zeros(6), sequences, counts)
    assert {name: value.item() for name, value in found.items()} == pytest.approx({"sequence_log_ratio": (0.2 + 0.6) / 4})
    maxima = sequence_maxima(delta, torch.zeros(6), sequences)
    assert {name: value.item() for name, value in maxima.items()} == pytest.approx(
        {"sequence_ratio_max": np.exp(0.1), "sequence_inverse_ratio_max": np.exp(0.6)}
    )
    assert not any(value.requires_grad for value in (*found.values(), *maxima.values()))
    assert all(value.isfinite() for value in sequence_maxima(delta * 1e3, torch.zeros(6), sequences).values())

"""The generalised Jensen-Shannon divergence: its expectation against TRL's numbers, and its estimates against formulas."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import GENERATION_LOGPROBS, REFERENCE_LOGPROBS, GlobalCounts, LossInputs
from rlcore_distill.config import DistillConfig
from rlcore_distill.gkd import PART_WEIGHTS, TEACHER_TEXT, divergence_terms, mixed_gkd_loss, sampled_gkd_loss, teacher_gkd_loss
from rlcore_distill.loss import forward_kl_loss, reverse_kl_loss

NUMBERS = json.loads(Path(__file__).with_name("trl_numbers.json").read_text())
BETAS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def make_inputs(current, generation, teacher, mask, offsets, counts=None, **columns):
    return LossInputs(
        logprobs=current,
        entropy=None,
        loss_mask=mask,
        offsets=offsets,
        token_columns={GENERATION_LOGPROBS: generation, REFERENCE_LOGPROBS: teacher, **columns},
        sequence_columns={},
        counts=counts or GlobalCounts(num_loss_tokens=int(mask.sum()), num_loss_sequences=len(offsets) - 1),
    )


def drawn(seed, lengths):
    """float64 columns [T] of random sequences, their mask, the texts of the teacher and the offsets."""
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = random.random(offsets[-1]) < 0.7
    mask[offsets[:-1]] = False
    written = np.repeat(random.random(len(lengths)) < 0.5, lengths)
    columns = [torch.tensor(-random.exponential(1.5, offsets[-1])) for _ in range(3)]
    return columns, torch.tensor(mask), torch.tensor(written), torch.tensor(offsets)


def expected_over(loss, weights, policy, teacher, config):
    """The mean over positions of the expectation of a loss, over one token of each position with probabilities `weights`."""
    total = torch.zeros((), dtype=torch.float64)
    for place in range(len(policy)):
        for token in range(policy.shape[1]):
            said, zero = policy[place, token], torch.zeros((), dtype=torch.float64)
            column = torch.stack([zero, said])
            others = torch.stack([zero, teacher[place, token]])
            inputs = make_inputs(column, column.detach(), others, torch.tensor([False, True]), torch.tensor([0, 2]))
            total = total + weights[place, token] * loss(inputs, config).loss / len(policy)
    return total


@pytest.mark.parametrize("case", NUMBERS["cases"], ids=lambda case: str(case["beta"]))
@pytest.mark.parametrize("samples", ["student", "teacher"])
def test_the_expectation_over_the_vocabulary_is_trls_loss_and_gradient(case, samples):
    logits = torch.tensor(NUMBERS["student"], dtype=torch.float64, requires_grad=True)
    policy, teacher = logits.log_softmax(-1), torch.tensor(NUMBERS["teacher"], dtype=torch.float64).log_softmax(-1)
    config = DistillConfig(samples=samples, beta=case["beta"], importance_maximum=math.inf)
    source, loss = (policy.detach(), sampled_gkd_loss) if samples == "student" else (teacher, teacher_gkd_loss)
    found = expected_over(loss, source.exp(), policy, teacher, config)
    (gradient,) = torch.autograd.grad(found, logits)
    assert found.item() == pytest.approx(case["loss"], rel=1e-12)
    np.testing.assert_allclose(gradient.numpy(), case["gradient"], rtol=1e-9, atol=1e-15)


@given(seed=st.integers(0, 999), lengths=LENGTHS, discount=st.sampled_from([0.0, 0.3, 1.0]))
def test_at_the_ends_they_are_the_kl_divergences(seed, lengths, discount):
    (current, generation, teacher), mask, _, offsets = drawn(seed, lengths)
    for ours, theirs, beta in ((sampled_gkd_loss, reverse_kl_loss, 1.0), (teacher_gkd_loss, forward_kl_loss, 0.0)):
        config, found = DistillConfig(beta=beta, discount=discount), []
        for loss in (ours, theirs):
            leaf = current.clone().requires_grad_()
            output = loss(make_inputs(leaf, generation, teacher, mask, offsets), config)
            output.loss.backward()
            found.append((output.loss.detach(), leaf.grad))
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@given(seed=st.integers(0, 999), lengths=LENGTHS, beta=BETAS, maximum=st.sampled_from([0.7, 2.0, math.inf]))
def test_a_step_of_both_parts_is_their_weighted_mean(seed, lengths, beta, maximum):
    (current, generation, teacher), mask, written, offsets = drawn(seed, lengths)
    config, share, total = DistillConfig(beta=beta, importance_maximum=maximum), 0.3, max(int(mask.sum()), 1)
    counts = [int((mask & part).sum()) for part in (~written, written)]
    weights = torch.zeros(len(mask), dtype=torch.float64)
    expected = 0.0
    for part, weight, count, loss in (
        (~written, share, counts[0], sampled_gkd_loss),
        (written, 1 - share, counts[1], teacher_gkd_loss),
    ):
        weights[mask & part] = weight * total / max(count, 1)
        inputs = make_inputs(current.clone().requires_grad_(), generation, teacher, mask & part, offsets)
        expected += weight * float(loss(inputs, config).loss.detach())
    columns = {TEACHER_TEXT: written, PART_WEIGHTS: weights}
    inputs = make_inputs(current.requires_grad_(), generation, teacher, mask, offsets, **columns)
    assert float(mixed_gkd_loss(inputs, config).loss.detach()) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(seed=st.integers(0, 999), lengths=LENGTHS, beta=BETAS, cut=st.integers(0, 6))
def test_microbatches_add_up(seed, lengths, beta, cut):
    columns, mask, written, offsets = drawn(seed, lengths)
    columns[0].requires_grad_()
    weights, config = torch.linspace(0.5, 2, len(mask), dtype=torch.float64), DistillConfig(beta=beta, discount=0.5)
    own = {TEACHER_TEXT: written, PART_WEIGHTS: weights}
    whole = make_inputs(*columns, mask, offsets, **own)
    parts = []
    for first, last in ((0, min(cut, len(lengths))), (min(cut, len(lengths)), len(lengths))):
        if first < last:
            tokens = slice(int(offsets[first]), int(offsets[last]))
            cut_columns = {name: column[tokens] for name, column in own.items()}
            starts = offsets[first : last + 1] - offsets[first]
            parts.append(make_inputs(*(one[tokens] for one in columns), mask[tokens], starts, whole.counts, **cut_columns))
    for loss in (sampled_gkd_loss, teacher_gkd_loss, mixed_gkd_loss):
        expected = float(loss(whole, config).loss.detach())
        assert float(sum(loss(part, config).loss for part in parts).detach()) == pytest.approx(expected)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_an_estimate_is_zero_where_policy_and_teacher_agree(beta):
    divergence, weight = divergence_terms(torch.zeros(3, dtype=torch.float64), beta)
    torch.testing.assert_close(divergence, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(weight, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("loss", [sampled_gkd_loss, teacher_gkd_loss, mixed_gkd_loss])
def test_nothing_outside_the_mask_reaches_value_or_gradient(loss):
    columns, mask, written, offsets = drawn(3, [5, 4])
    weights = torch.ones(len(mask), dtype=torch.float64)
    for column in (*columns, weights):
        column[~mask] = math.nan
    columns[0].requires_grad_()
    inputs = make_inputs(*columns, mask, offsets, **{TEACHER_TEXT: written, PART_WEIGHTS: weights})
    output = loss(inputs, DistillConfig(beta=0.5, discount=0.5))
    output.loss.backward()
    assert math.isfinite(float(output.loss.detach()))
    assert columns[0].grad[~mask].eq(0).all()
    assert columns[0].grad.isfinite().all()

"""The divergences against formulas in float64: by hand, and by all sequences that a small policy can say."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import GENERATION_LOGPROBS, REFERENCE_LOGPROBS, GlobalCounts, LossInputs
from rlcore_distill.config import DistillConfig
from rlcore_distill.loss import forward_kl_loss, reverse_kl_loss

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
DISCOUNTS = st.sampled_from([0.0, 0.3, 1.0])


def make_inputs(current, generation, teacher, mask, offsets, counts=None):
    return LossInputs(
        logprobs=current,
        entropy=None,
        loss_mask=mask,
        offsets=offsets,
        token_columns={GENERATION_LOGPROBS: generation, REFERENCE_LOGPROBS: teacher},
        sequence_columns={},
        counts=counts or GlobalCounts(num_loss_tokens=int(mask.sum()), num_loss_sequences=len(offsets) - 1),
    )


def drawn(seed, lengths):
    """float64 columns [T] of random sequences whose first tokens are prompts."""
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = random.random(offsets[-1]) < 0.7
    mask[offsets[:-1]] = False
    columns = [torch.tensor(-random.exponential(1.5, offsets[-1])) for _ in range(3)]
    return *columns, torch.tensor(mask), torch.tensor(offsets)


@given(seed=st.integers(0, 999), lengths=LENGTHS, discount=DISCOUNTS, maximum=st.sampled_from([0.7, 2.0, math.inf]))
def test_reverse_kl_is_the_formula(seed, lengths, discount, maximum):
    current, generation, teacher, mask, offsets = drawn(seed, lengths)
    current.requires_grad_()
    output = reverse_kl_loss(
        make_inputs(current, generation, teacher, mask, offsets), DistillConfig(discount=discount, importance_maximum=maximum)
    )
    output.loss.backward()
    expected, gradient, divergence = 0.0, np.zeros(len(mask)), 0.0
    num_tokens = max(int(mask.sum()), 1)
    gap, far = ((current.detach() - column).tolist() for column in (teacher, generation))
    for begin, end in itertools.pairwise(offsets.tolist()):
        told = [t for t in range(begin, end) if mask[t]]
        for place, t in enumerate(told):
            ahead = sum(discount**steps * gap[u] for steps, u in enumerate(told[place:]))
            weight = min(math.exp(far[t]), maximum) / num_tokens
            expected += weight * gap[t]
            gradient[t] = weight * ahead
            divergence += gap[t] / num_tokens
    assert float(output.loss.detach()) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(current.grad.numpy(), gradient, rtol=1e-9, atol=1e-12)
    assert float(output.sums["reverse_kl"]) == pytest.approx(divergence, rel=1e-5, abs=1e-6)


@given(seed=st.integers(0, 999), lengths=LENGTHS, discount=DISCOUNTS, cut=st.integers(0, 6))
def test_microbatches_add_up(seed, lengths, discount, cut):
    current, generation, teacher, mask, offsets = drawn(seed, lengths)
    whole = make_inputs(current.requires_grad_(), generation, teacher, mask, offsets)
    cut = min(cut, len(lengths))
    parts = []
    for first, last in ((0, cut), (cut, len(lengths))):
        if first < last:
            tokens = slice(int(offsets[first]), int(offsets[last]))
            columns = (column[tokens] for column in (current, generation, teacher, mask))
            parts.append(make_inputs(*columns, offsets[first : last + 1] - offsets[first], whole.counts))
    for loss in (reverse_kl_loss, forward_kl_loss):
        config = DistillConfig(discount=discount)
        expected = loss(whole, config).loss
        assert float(sum(loss(part, config).loss for part in parts).detach()) == pytest.approx(float(expected.detach()))


@pytest.mark.parametrize("discount", [0.0, 1.0])
def test_the_expected_gradient_is_that_of_the_divergence(discount):
    """All 27 texts of three tokens over an alphabet of three, each as likely as the policy says. With a discount of 1 the
    gradient is that of KL(policy ‖ teacher) of whole texts; with 0 that of each token's divergence where prefixes are given."""
    torch.manual_seed(0)
    length, letters = 3, 3
    texts = list(itertools.product(range(letters), repeat=length))
    prefixes = [text[:n] for n in range(length) for text in itertools.product(range(letters), repeat=n)]
    prefixes = sorted({tuple(prefix) for prefix in prefixes})
    row = {prefix: number for number, prefix in enumerate(prefixes)}
    logits = torch.randn(len(prefixes), letters, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(len(prefixes), letters, dtype=torch.float64).log_softmax(-1)

    def of(table, text):
        return torch.stack([table[row[text[:place]], letter] for place, letter in enumerate(text)])

    policy = logits.log_softmax(-1)
    found = torch.zeros((), dtype=torch.float64)
    for text in texts:
        said = of(policy, text)
        zero = torch.zeros(1, dtype=torch.float64)
        column = torch.cat([zero, said])
        inputs = make_inputs(
            column,
            column.detach(),
            torch.cat([zero, of(teacher, text)]),
            torch.tensor([False] + [True] * length),
            torch.tensor([0, length + 1]),
        )
        probability = said.sum().exp().detach()
        found = found + probability * length * reverse_kl_loss(inputs, DistillConfig(discount=discount)).loss
    (gradient,) = torch.autograd.grad(found, logits)
    policy, expected = logits.log_softmax(-1), torch.zeros((), dtype=torch.float64)
    for prefix in prefixes:
        reached = torch.ones((), dtype=torch.float64)
        for place, letter in enumerate(prefix):
            reached = reached * policy[row[prefix[:place]], letter].exp()
        here = policy[row[prefix]]
        divergence = (here.exp() * (here - teacher[row[prefix]])).sum()
        expected = expected + (reached if discount else reached.detach()) * divergence
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


@given(seed=st.integers(0, 999), lengths=LENGTHS)
def test_forward_kl_has_the_gradient_of_the_likelihood(seed, lengths):
    current, generation, teacher, mask, offsets = drawn(seed, lengths)
    current.requires_grad_()
    output = forward_kl_loss(make_inputs(current, generation, teacher, mask, offsets), DistillConfig())
    output.loss.backward()
    share = mask.double() / max(int(mask.sum()), 1)
    assert float(output.loss.detach()) == pytest.approx(float(((teacher - current.detach()) * share).sum()))
    torch.testing.assert_close(current.grad, -share)


@pytest.mark.parametrize("loss", [reverse_kl_loss, forward_kl_loss])
def test_nothing_outside_the_mask_reaches_value_or_gradient(loss):
    current, generation, teacher, mask, offsets = drawn(3, [5, 4])
    for column in (current, generation, teacher):
        column[~mask] = math.nan
    current.requires_grad_()
    output = loss(make_inputs(current, generation, teacher, mask, offsets), DistillConfig(discount=0.5))
    output.loss.backward()
    assert math.isfinite(float(output.loss.detach()))
    assert current.grad[~mask].eq(0).all()
    assert current.grad.isfinite().all()

"""The loss of supervised fine-tuning against float64 numpy, and its invariance to microbatches."""

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import LossInputs, TokenBatch
from rlcore_sft.config import SftConfig
from rlcore_sft.loss import sft_loss

LENGTHS = np.array([4, 1, 7, 2, 5])


def make_batch(seed):
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    mask = random.random(offsets[-1]) < 0.6
    mask[offsets[:-1]] = False
    batch = TokenBatch(tokens=np.zeros(offsets[-1], np.int32), offsets=offsets, loss_mask=mask)
    return batch, -random.exponential(1.0, offsets[-1])


def run(batch, logprobs, counts=None):
    leaf = torch.tensor(logprobs, requires_grad=True)
    inputs = LossInputs(
        logprobs=leaf,
        entropy=None,
        loss_mask=torch.tensor(batch.loss_mask),
        offsets=torch.tensor(batch.offsets),
        token_columns={},
        sequence_columns={},
        counts=counts or batch.counts(),
    )
    output = sft_loss(inputs, SftConfig())
    output.loss.backward()
    return output, leaf.grad.numpy()


def test_loss_gradient_and_metrics_match_their_definitions():
    """Maximum likelihood: the mean over completion tokens of -log p."""
    batch, logprobs = make_batch(0)
    output, gradient = run(batch, logprobs)
    inside = logprobs[batch.loss_mask]
    assert output.loss.item() == pytest.approx(-inside.mean(), rel=1e-12)
    np.testing.assert_allclose(gradient, -1.0 * batch.loss_mask / len(inside), rtol=1e-12)
    assert output.sums["token_accuracy_bound"].item() == pytest.approx((np.exp(inside) > 0.5).mean())
    assert output.maxima["token_loss_max"].item() == -inside.min()


@settings(deadline=None, max_examples=30)
@given(data=st.data(), seed=st.integers(0, 10**6))
def test_loss_and_gradient_do_not_depend_on_cut_or_order(data, seed):
    batch, logprobs = make_batch(seed)
    whole, whole_gradient = run(batch, logprobs)
    order = np.array(data.draw(st.permutations(range(len(LENGTHS)))), np.int64)
    loss, gradient = 0.0, np.zeros_like(whole_gradient)
    for part in np.split(order, sorted(data.draw(st.sets(st.integers(1, len(LENGTHS) - 1))))):
        where = np.concatenate([np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in part])
        output, gradient[where] = run(batch.select(part), logprobs[where], batch.counts())
        loss += output.loss.item()
    assert loss == pytest.approx(whole.loss.item(), rel=1e-12)
    np.testing.assert_allclose(gradient, whole_gradient, rtol=1e-12)


def test_what_stands_outside_the_mask_reaches_nothing_and_a_nan_inside_is_not_hidden():
    batch, logprobs = make_batch(1)
    plain, gradient = run(batch, logprobs)
    spoilt, spoilt_gradient = run(batch, np.where(batch.loss_mask, logprobs, np.nan))
    assert torch.equal(plain.loss, spoilt.loss)
    np.testing.assert_array_equal(gradient, spoilt_gradient)
    logprobs[batch.loss_mask.argmax()] = np.nan
    assert torch.isnan(run(batch, logprobs)[0].loss)


def test_without_a_loss_token_loss_and_gradient_are_zero():
    batch, _ = make_batch(2)
    empty = evolve(batch, loss_mask=np.zeros_like(batch.loss_mask))
    output, gradient = run(empty, np.zeros(batch.num_tokens))
    assert output.loss.item() == 0.0
    assert not gradient.any()

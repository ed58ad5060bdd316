"""The derivatives of a loss, for a trainer in another library, equal a formula and the chain rule."""

import numpy as np
import pytest
import torch
from attrs import evolve

from rlcore.spi import ADVANTAGES, ContractError, LossSpec
from rlcore_conformance.references.probe import PROBE_WEIGHT, ProbeConfig, ValueProbeConfig
from rlcore_conformance.trainers.batches import make_batch, with_logprobs
from rlcore_torchkit.trainer.loss_gradients import LossGradients, loss_gradients, total_loss

BATCH = make_batch(32, seed=0)
COUNTS = BATCH.counts()
LOSS = LossSpec(
    path="rlcore_conformance.references.torch_losses:probe_loss",
    config=ProbeConfig(entropy_coefficient=0.3),
    token_columns=(ADVANTAGES,),
    entropy="loss",
)
RANDOM = np.random.default_rng(1)
LOGPROBS = -RANDOM.exponential(2.0, BATCH.num_tokens).astype(np.float32)
ENTROPY = RANDOM.exponential(2.0, BATCH.num_tokens).astype(np.float32)


def test_derivatives_are_those_of_the_probes_formula():
    found = loss_gradients(LOSS, BATCH, COUNTS, logprobs=LOGPROBS, entropy=ENTROPY)
    mask = BATCH.loss_mask.astype(np.float64)
    share = BATCH.sequence_columns[PROBE_WEIGHT] / np.maximum(BATCH.loss_lengths, 1) / COUNTS.num_loss_sequences
    per_token = -BATCH.token_columns[ADVANTAGES] / COUNTS.num_loss_tokens + np.repeat(share, BATCH.lengths)
    np.testing.assert_allclose(found.logprobs, mask * per_token, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(found.entropy, -0.3 * mask / COUNTS.num_loss_tokens, rtol=1e-6)
    assert found.values is None
    assert found.logprobs.dtype == found.entropy.dtype == np.float32
    assert type(found.loss) is float


def test_backpropagated_by_the_chain_rule_they_are_the_gradient_of_the_weights():
    weights = torch.randn(BATCH.num_tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor(BATCH.tokens.astype(np.int64))

    def figures(logits):
        table = logits.log_softmax(1)
        return table.gather(1, tokens[:, None])[:, 0], -(table.exp() * table).sum(1)

    leaf = weights.clone().requires_grad_()
    logprobs, entropy = figures(leaf)
    found = loss_gradients(
        LOSS, BATCH, COUNTS, logprobs=logprobs.detach().float().numpy(), entropy=entropy.detach().float().numpy()
    )
    (logprobs @ torch.tensor(found.logprobs).double() + entropy @ torch.tensor(found.entropy).double()).backward()

    def loss_at(moved):
        logprobs, entropy = (part.numpy() for part in figures(moved))
        mask, weight = BATCH.loss_mask, BATCH.sequence_columns[PROBE_WEIGHT].astype(np.float64)
        means = np.add.reduceat(mask * logprobs, BATCH.offsets[:-1]) / np.maximum(BATCH.loss_lengths, 1)
        per_token = mask * (BATCH.token_columns[ADVANTAGES] * logprobs + 0.3 * entropy)
        return -per_token.sum() / COUNTS.num_loss_tokens + (weight * means).sum() / COUNTS.num_loss_sequences

    direction = torch.randn(weights.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    slope = (loss_at(weights + 1e-5 * direction) - loss_at(weights - 1e-5 * direction)) / 2e-5
    assert float((leaf.grad * direction).sum()) == pytest.approx(slope, rel=1e-5)


def test_previous_logprobs_have_no_gradient():
    unchanged = evolve(LOSS, previous_logprobs="unchanged")
    given = evolve(LOSS, previous_logprobs="given", token_columns=(ADVANTAGES, "previous_logprobs"))
    found = loss_gradients(unchanged, BATCH, COUNTS, logprobs=LOGPROBS, entropy=ENTROPY)
    batch = BATCH.with_token_column("previous_logprobs", LOGPROBS)
    expected = loss_gradients(given, batch, COUNTS, logprobs=LOGPROBS, entropy=ENTROPY)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    plain = loss_gradients(LOSS, BATCH, COUNTS, logprobs=LOGPROBS, entropy=ENTROPY)
    assert (found.logprobs != plain.logprobs).any()


def test_a_loss_of_values_has_derivatives_of_them_alone():
    loss = LossSpec(
        path="rlcore_conformance.references.torch_losses:value_probe_loss",
        config=ValueProbeConfig(),
        token_columns=(ADVANTAGES,),
    )
    zeros = np.zeros(BATCH.num_tokens, np.float32)
    found = loss_gradients(loss, BATCH, COUNTS, logprobs=zeros, values=LOGPROBS)
    expected = BATCH.loss_mask * (LOGPROBS - BATCH.token_columns[ADVANTAGES]) / COUNTS.num_loss_tokens
    counted = BATCH.sequence_columns[PROBE_WEIGHT] * (BATCH.loss_lengths > 0) / COUNTS.num_loss_sequences
    expected[BATCH.offsets[1:] - 1] += counted
    np.testing.assert_allclose(found.values, expected, rtol=1e-5, atol=1e-8)
    assert found.logprobs is None
    assert found.entropy is None


def test_outputs_of_microbatches_add_up_with_how_far_the_generator_is():
    loss = evolve(LOSS, token_columns=(ADVANTAGES, "generation_logprobs"), generation_mismatch=True)
    batch = with_logprobs(BATCH, "generation_logprobs")
    whole = loss_gradients(loss, batch, COUNTS, logprobs=LOGPROBS, entropy=ENTROPY)
    cut = int(batch.offsets[3])
    parts = [
        loss_gradients(loss, batch.select(np.arange(*span)), COUNTS, logprobs=LOGPROBS[tokens], entropy=ENTROPY[tokens])
        for span, tokens in (((0, 3), slice(cut)), ((3, batch.num_sequences), slice(cut, None)))
    ]
    loss_of_all, metrics = total_loss(parts)
    assert loss_of_all == pytest.approx(whole.loss, rel=1e-5)
    assert metrics == pytest.approx({**whole.sums, **whole.maxima}, rel=1e-5)
    assert "token_mult_prob_error" in metrics
    np.testing.assert_allclose(np.concatenate([part.logprobs for part in parts]), whole.logprobs, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("figures", [LOGPROBS[:-1], LOGPROBS.astype(np.float64), LOGPROBS.tolist()])
def test_figures_of_another_form_are_refused(figures):
    with pytest.raises(ContractError, match="logprobs"):
        loss_gradients(LOSS, BATCH, COUNTS, logprobs=figures, entropy=ENTROPY)


def part(loss=1.0, **metrics):
    return LossGradients(loss=loss, logprobs=None, entropy=None, values=None, **{"sums": {}, "maxima": {}, **metrics})


def test_sums_are_added_and_of_maxima_the_greatest_counts():
    parts = [part(1.5, sums={"a": 1.0}, maxima={"b": 3.0}), part(0.5, sums={"a": 2.0}, maxima={"b": -1.0})]
    assert total_loss(parts) == (2.0, {"a": 3.0, "b": 3.0})


def test_microbatches_with_other_metrics_are_refused():
    with pytest.raises(ContractError, match=r"metrics \['b'\] after \['a'\]"):
        total_loss([part(sums={"a": 1.0}), part(sums={"b": 1.0})])

"""Checks of a trainer that normalises over the tokens that truncated sampling had kept."""

from typing import Literal

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import LossSpec, SamplingMask, TokenBatch, capabilities
from rlcore_conformance.references.probe import ProbeConfig, expected_probe
from rlcore_conformance.references.reference import Reference, reference_logprobs
from rlcore_conformance.trainers.batches import arrange, arranged_indices
from rlcore_conformance.trainers.step_outcome import assert_close
from rlcore_conformance.trainers.trainer_fixtures import TrainerFixtures, TrainerUnderTest, with_loss

MOST_KEPT = 5
TEMPERATURE = 0.7


class TrainerSamplingMask(TrainerFixtures):
    """Log-probabilities, entropies and gradients are those of the kept tokens."""

    @pytest.fixture
    def masked(self, trainer: TrainerUnderTest, reference: Reference, batch: TokenBatch) -> TokenBatch:
        """The batch with a few kept tokens for each token, for some it alone, and for some all of them."""
        trainer.require(capabilities.SAMPLING_MASK_REPLAY)
        return with_mask(batch, reference.vocab_size)

    @pytest.mark.parametrize("whose", ["policy", "reference"])
    def test_masked_logprobs_equal_the_reference(
        self,
        trainer: TrainerUnderTest,
        reference: Reference,
        batch: TokenBatch,
        masked: TokenBatch,
        whose: Literal["policy", "reference"],
    ) -> None:
        """Policy and reference, in any microbatches; a batch without a mask is as it was before."""
        if whose == "reference":
            trainer.require(capabilities.REFERENCE_POLICY)
        policy = reference.load(trainer.weights())
        (before,) = trainer.logprobs((batch,), model=whose, temperature=TEMPERATURE)
        expected, _ = reference_logprobs(policy, masked, TEMPERATURE)
        column = masked.with_token_column("expected", expected.astype(np.float32))
        found = trainer.logprobs(arrange(masked, "uneven"), model=whose, temperature=TEMPERATURE)
        for indices, part in zip(arranged_indices(masked, "uneven"), found, strict=True):
            wanted = column.select(indices).token_columns["expected"]
            np.testing.assert_allclose(part, wanted, rtol=0, atol=trainer.tolerance)
        (after,) = trainer.logprobs((batch,), model=whose, temperature=TEMPERATURE)
        np.testing.assert_array_equal(after, before, err_msg="the mask outlasts the batch it came with")

    def test_masked_entropy_equals_the_reference(
        self, trainer: TrainerUnderTest, reference: Reference, masked: TokenBatch
    ) -> None:
        """It is the entropy of what could be sampled."""
        trainer.require(capabilities.ENTROPY)
        _, expected = reference_logprobs(reference.load(trainer.weights()), masked, TEMPERATURE)
        np.testing.assert_allclose(trainer.entropy(masked, 0, TEMPERATURE), expected, rtol=0, atol=trainer.tolerance)

    @pytest.mark.parametrize("entropy", ["none", "loss"])
    def test_masked_step_equals_the_reference(
        self,
        trainer: TrainerUnderTest,
        reference: Reference,
        masked: TokenBatch,
        loss: LossSpec,
        entropy: Literal["none", "loss"],
    ) -> None:
        """The loss sees the log-probabilities of the kept tokens, and its gradient is theirs."""
        if entropy != "none":
            trainer.require(capabilities.ENTROPY)
        chosen, policy = with_loss(loss, entropy=entropy), reference.load(trainer.weights())
        logprobs, entropies = reference_logprobs(policy, masked, TEMPERATURE)
        assert isinstance(chosen.config, ProbeConfig)
        value, _ = expected_probe(masked, logprobs, None if entropy == "none" else entropies, chosen.config)
        norm = policy.gradient_norm(masked, chosen, TEMPERATURE)
        result = trainer.step(arrange(masked, "uneven"), loss=chosen, temperature=TEMPERATURE)
        assert_close("loss", result.loss, value, trainer.tolerance)
        assert_close("grad_norm", result.grad_norm, norm, trainer.gradient_tolerance)


def with_mask(batch: TokenBatch, vocab_size: int) -> TokenBatch:
    """The batch with random kept tokens; each token's own stands anywhere among its row's. A third of the rows is empty."""
    random, kept = np.random.default_rng(13), []
    for token in batch.tokens.tolist():
        others = np.setdiff1d(random.choice(vocab_size, random.integers(0, MOST_KEPT), replace=False), [token])
        row = random.permutation([token, *others.tolist()]) if random.random() < 2 / 3 else np.zeros(0)
        kept.append(row.astype(np.int32))
    return evolve(batch, sampling_mask=SamplingMask.of(kept))

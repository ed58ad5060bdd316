"""Checks of a trainer that normalises over the tokens that truncated sampling had kept."""

from typing import Literal

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import SamplingMask, TokenBatch, capabilities
from rlcore_conformance.references.reference import Reference, reference_logprobs
from rlcore_conformance.trainers.batches import arrange, arranged
from rlcore_conformance.trainers.trainer_fixtures import TrainerFixtures, TrainerUnderTest, expected_loss, with_loss

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
        self, trainer: TrainerUnderTest, batch: TokenBatch, masked: TokenBatch, whose: Literal["policy", "reference"]
    ) -> None:
        """Policy and reference, in any microbatches; a batch without a mask is as it was before."""
        if whose == "reference":
            trainer.require(capabilities.REFERENCE_POLICY)
        (before,) = trainer.logprobs((batch,), model=whose, temperature=TEMPERATURE)
        expected, _ = reference_logprobs(trainer.policy(), masked, TEMPERATURE)
        found = trainer.logprobs(arrange(masked, "uneven"), model=whose, temperature=TEMPERATURE)
        for part, wanted in zip(found, arranged(expected, masked, "uneven"), strict=True):
            trainer.assert_near(part, wanted)
        (after,) = trainer.logprobs((batch,), model=whose, temperature=TEMPERATURE)
        np.testing.assert_array_equal(after, before, err_msg="the mask outlasts the batch it came with")

    def test_masked_entropy_equals_the_reference(self, trainer: TrainerUnderTest, masked: TokenBatch) -> None:
        """It is the entropy of what could be sampled."""
        trainer.require(capabilities.ENTROPY)
        _, expected = reference_logprobs(trainer.policy(), masked, TEMPERATURE)
        trainer.assert_near(trainer.entropy(masked, 0, TEMPERATURE), expected)

    @pytest.mark.parametrize("entropy", ["none", "loss"])
    def test_masked_step_equals_the_reference(
        self, trainer: TrainerUnderTest, masked: TokenBatch, entropy: Literal["none", "loss"]
    ) -> None:
        """The loss sees the log-probabilities of the kept tokens, and its gradient is theirs."""
        if entropy != "none":
            trainer.require(capabilities.ENTROPY)
        loss, policy = with_loss(trainer.loss, entropy=entropy), trainer.policy()
        expected, norm = expected_loss(policy, masked, loss, TEMPERATURE), policy.gradient_norm(masked, loss, TEMPERATURE)
        result = trainer.step(arrange(masked, "uneven"), loss=loss, temperature=TEMPERATURE)
        trainer.assert_loss(result, *expected)
        trainer.assert_grad_norm(result, norm)


def with_mask(batch: TokenBatch, vocab_size: int) -> TokenBatch:
    """The batch with random kept tokens; each token's own stands anywhere among its row's. A third of the rows is empty."""
    random, kept = np.random.default_rng(13), []
    for token in batch.tokens.tolist():
        others = np.setdiff1d(random.choice(vocab_size, random.integers(0, MOST_KEPT), replace=False), [token])
        row = random.permutation([token, *others.tolist()]) if random.random() < 2 / 3 else np.zeros(0)
        kept.append(row.astype(np.int32))
    return evolve(batch, sampling_mask=SamplingMask.of(kept))

"""Checks of a trainer that sends tokens where it is told to."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rlcore.spi import ROUTED_EXPERTS, ModelSpec, Provider, TokenBatch, capabilities
from rlcore.spi.arrays import Int16Array
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.reference import Float64Array, RoutedPolicy, log_softmax
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainers.batches import arrange, arranged, make_batch
from rlcore_conformance.trainers.trainer_fixtures import OpenTrainer, TrainerFixtures, TrainerUnderTest

VOCABULARY_SIZE = 32
"""Tokens that sequences are made of."""


class TrainerRouting(TrainerFixtures):
    """Experts that are given take the place of those that a router would choose."""

    @pytest.fixture
    def routed_trainer(
        self, provider: Provider, open_trainer: OpenTrainer, routed_model: ModelSpec
    ) -> Iterator[TrainerUnderTest]:
        """A fresh trainer of the mixture-of-experts model."""
        require(provider, capabilities.ROUTING_REPLAY)
        with open_trainer(model=routed_model) as trainer:
            yield trainer

    @pytest.fixture
    def routed_policy(
        self, routed_trainer: TrainerUnderTest, routed_reference: Callable[[Values], RoutedPolicy]
    ) -> RoutedPolicy:
        """The reference with that trainer's weights."""
        return routed_reference(routed_trainer.weights())

    def test_routed_tokens_equal_the_reference(self, routed_trainer: TrainerUnderTest, routed_policy: RoutedPolicy) -> None:
        """Log-probabilities and gradient, with experts at random and tokens here and there left to the router."""
        batch = make_batch(VOCABULARY_SIZE, seed=5)
        routed = batch.with_token_column(ROUTED_EXPERTS, random_experts(routed_policy, batch))
        expected = routed_logprobs(routed_policy, routed)
        (own,) = routed_trainer.logprobs((batch,))
        assert np.abs(own - expected).max() > 10 * routed_trainer.tolerance, "the experts given make no difference to the model"
        found = routed_trainer.logprobs(arrange(routed, "uneven"))
        for part, wanted in zip(found, arranged(expected, batch, "uneven"), strict=True):
            routed_trainer.assert_near(part, wanted)
        (after,) = routed_trainer.logprobs((batch,))
        routed_trainer.assert_near(after, own, "routing outlasts the batch it came with")
        norm = routed_policy.gradient_norm(routed, routed_trainer.loss, 1.0)
        routed_trainer.assert_grad_norm(routed_trainer.step(arrange(routed, "uneven")), norm)

    def test_own_routing_changes_nothing(self, routed_trainer: TrainerUnderTest, routed_policy: RoutedPolicy) -> None:
        """Experts that the model chooses by itself, in another order, and none at all."""
        batch = make_batch(VOCABULARY_SIZE, seed=6)
        tokens = np.split(batch.tokens, batch.offsets[1:-1])
        experts = np.concatenate([routed_policy.choices(sequence)[0] for sequence in tokens])
        (expected,) = routed_trainer.logprobs((batch,))
        for column in (np.ascontiguousarray(experts[..., ::-1]), np.full_like(experts, -1)):
            (found,) = routed_trainer.logprobs((batch.with_token_column(ROUTED_EXPERTS, column),))
            routed_trainer.assert_near(found, expected)


def random_experts(policy: RoutedPolicy, batch: TokenBatch) -> Int16Array:
    """int16 [T, L, K]: different experts for each token in each layer that has some, and for a few tokens none."""
    random = np.random.default_rng(7)
    shape = policy.choices(batch.tokens[:1])[0].shape[1:]
    scores = random.random((batch.num_tokens, shape[0], policy.num_experts))
    experts = scores.argsort(-1)[..., : shape[1]].astype(np.int16)
    experts[:, (policy.choices(batch.tokens[:1])[0] < 0).all((0, 2))] = -1
    experts[random.random(batch.num_tokens) < 0.2] = -1
    return experts


def routed_logprobs(policy: RoutedPolicy, batch: TokenBatch) -> Float64Array:
    """Log-probabilities of a packed batch at temperature 1, float64 [T], 0.0 at first tokens; each sequence run alone."""
    logprobs, routed = np.zeros(batch.num_tokens), batch.token_columns[ROUTED_EXPERTS]
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = batch.tokens[start:end]
        table = log_softmax(policy.routed_logits(tokens, routed[start:end])[:-1])
        logprobs[start + 1 : end] = table[np.arange(len(table)), tokens[1:]]
    return logprobs

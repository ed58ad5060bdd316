"""Checks of what a trainer computes: log-probabilities, losses, gradients, updates."""

from typing import Literal

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import GENERATION_LOGPROBS, MISMATCH_METRICS, PREVIOUS_LOGPROBS, LossSpec, TokenBatch, capabilities
from rlcore_conformance.references.probe import expected_mismatch
from rlcore_conformance.references.reference import Reference, reference_logprobs
from rlcore_conformance.trainers.batches import (
    ARRANGEMENTS,
    LONG_LENGTHS,
    Arrangement,
    arrange,
    arranged,
    make_batch,
    scaled_counts,
    with_logprobs,
    without_loss,
)
from rlcore_conformance.trainers.step_outcome import assert_close, assert_same_step
from rlcore_conformance.trainers.trainer_fixtures import (
    BaselineRun,
    OpenTrainer,
    TrainerFixtures,
    TrainerUnderTest,
    expected_loss,
    with_loss,
)

REORDERED: tuple[Arrangement, ...] = tuple(arrangement for arrangement in ARRANGEMENTS if arrangement != "together")
TEMPERATURES = (1.0, 0.6)


class TrainerNumerics(TrainerFixtures):
    """Numbers are compared with the reference's; what must not matter is varied."""

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_logprobs_equal_the_reference(self, trainer: TrainerUnderTest, batch: TokenBatch, temperature: float) -> None:
        """At every token but the first of a sequence, whatever the loss mask says."""
        expected, _ = reference_logprobs(trainer.policy(), batch, temperature)
        (found,) = trainer.logprobs((batch,), temperature=temperature)
        trainer.assert_near(found, expected)

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_entropy_equals_the_reference(self, trainer: TrainerUnderTest, batch: TokenBatch, temperature: float) -> None:
        """Entropies, in nats and of the tempered distribution, equal the reference's."""
        trainer.require(capabilities.ENTROPY)
        _, expected = reference_logprobs(trainer.policy(), batch, temperature)
        trainer.assert_near(trainer.entropy(batch, 0, temperature), expected)

    def test_long_sequences_equal_the_reference(self, trainer: TrainerUnderTest, reference: Reference) -> None:
        """Log-probabilities, entropies, loss and gradient of sequences of 61 and 270 tokens."""
        policy, batch = trainer.policy(), make_batch(reference.vocab_size, seed=4, lengths=LONG_LENGTHS)
        logprobs, entropy = reference_logprobs(policy, batch, 1.0)
        trainer.assert_near(trainer.logprobs((batch,))[0], logprobs)
        if capabilities.ENTROPY in trainer.provider.capabilities:
            trainer.assert_near(trainer.entropy(batch, 0, 1.0), entropy)
        result = trainer.step((batch,))
        trainer.assert_loss(result, *expected_loss(policy, batch, trainer.loss))
        trainer.assert_grad_norm(result, policy.gradient_norm(batch, trainer.loss, 1.0))

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_reference_equals_the_first_policy(
        self, trainer: TrainerUnderTest, reference: Reference, batch: TokenBatch, temperature: float
    ) -> None:
        """They are equal in each of several microbatches, for long sequences too, at the step's temperature."""
        trainer.require(capabilities.REFERENCE_POLICY)
        policy = trainer.policy()
        batches = batch, make_batch(reference.vocab_size, seed=4, lengths=LONG_LENGTHS)
        found = trainer.logprobs(batches, model="reference", temperature=temperature)
        for number, (each, logprobs) in enumerate(zip(batches, found, strict=True), start=1):
            expected, _ = reference_logprobs(policy, each, temperature)
            trainer.assert_near(logprobs, expected, f"the reference in microbatch {number}")

    @pytest.mark.parametrize("arrangement", REORDERED)
    def test_logprobs_do_not_depend_on_the_microbatches(
        self, trainer: TrainerUnderTest, batch: TokenBatch, arrangement: Arrangement
    ) -> None:
        """A sequence's log-probabilities are its own, whatever is packed around it."""
        (together,) = trainer.logprobs((batch,))
        found = trainer.logprobs(arrange(batch, arrangement))
        for part, expected in zip(found, arranged(together, batch, arrangement), strict=True):
            trainer.assert_near(part, expected)

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_loss_and_metrics_equal_the_reference(
        self, trainer: TrainerUnderTest, batch: TokenBatch, arrangement: Arrangement, temperature: float
    ) -> None:
        """Sums are added over all microbatches, each once; of maxima the greatest counts."""
        expected = expected_loss(trainer.policy(), batch, trainer.loss, temperature)
        trainer.assert_loss(trainer.step(arrange(batch, arrangement), temperature=temperature), *expected)

    def test_the_loss_sees_the_sequences_of_a_microbatch_in_their_order(
        self, trainer: TrainerUnderTest, batch: TokenBatch
    ) -> None:
        """And all of them at once: algorithms compare the sequences of a group (AlgorithmNeeds.whole_groups)."""
        loss = with_loss(trainer.loss, neighbours=True)
        expected = expected_loss(trainer.policy(), batch, loss)
        pairs = np.arange(batch.num_sequences).reshape(-1, 2)
        microbatches = batch.select(pairs[1]), batch.select(np.delete(pairs, 1, 0).reshape(-1))
        trainer.assert_loss(trainer.step(microbatches, loss=loss), *expected)

    @pytest.mark.parametrize("entropy", ["none", "metric", "loss"])
    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_grad_norm_equals_the_reference(
        self, trainer: TrainerUnderTest, batch: TokenBatch, temperature: float, entropy: Literal["none", "metric", "loss"]
    ) -> None:
        """Before clipping; with a gradient of the entropy exactly where the loss asks for one."""
        if entropy != "none":
            trainer.require(capabilities.ENTROPY)
        loss = with_loss(trainer.loss, entropy=entropy)
        expected = trainer.policy().gradient_norm(batch, loss, temperature)
        trainer.assert_grad_norm(trainer.step(arrange(batch, "reversed"), temperature=temperature, loss=loss), expected)

    @pytest.mark.parametrize("declared", ["unchanged", "given", "absent"])
    def test_previous_logprobs_are_those_declared(
        self, trainer: TrainerUnderTest, batch: TokenBatch, declared: Literal["unchanged", "given", "absent"]
    ) -> None:
        """The step's own, without a gradient; those of the column; or none. The column is there in each case."""
        trainer.require(capabilities.PREVIOUS_LOGPROBS)
        carrying, policy = with_logprobs(batch, PREVIOUS_LOGPROBS), trainer.policy()
        loss = with_loss(trainer.loss, previous_logprobs=declared)
        expected, norm = expected_loss(policy, carrying, loss), policy.gradient_norm(carrying, loss, 1.0)
        result = trainer.step(arrange(carrying, "reversed"), loss=loss)
        trainer.assert_loss(result, *expected)
        trainer.assert_grad_norm(result, norm)

    @pytest.mark.parametrize("arrangement", ["together", "uneven"])
    def test_generation_mismatch_is_reported_for_any_loss(
        self, open_trainer: OpenTrainer, loss: LossSpec, batch: TokenBatch, arrangement: Arrangement
    ) -> None:
        """It comes beside the metrics of a loss that knows nothing of it; the update is the one without."""
        carrying = with_logprobs(batch, GENERATION_LOGPROBS)
        with open_trainer() as trainer:
            before, policy = trainer.weights(), trainer.policy()
            plain = trainer.outcome(arrange(carrying, arrangement), temperature=TEMPERATURES[1])
        with open_trainer() as trainer:
            chosen = evolve(loss, generation_mismatch=True, token_columns=(*loss.token_columns, GENERATION_LOGPROBS))
            found = trainer.outcome(arrange(carrying, arrangement), temperature=TEMPERATURES[1], loss=chosen)
        logprobs, _ = reference_logprobs(policy, batch, TEMPERATURES[1])
        for name, expected in expected_mismatch(carrying, logprobs).items():
            assert_close(name, found.result.metrics[name], expected, trainer.tolerance)
        metrics = {name: value for name, value in found.result.metrics.items() if name not in MISMATCH_METRICS}
        assert_same_step(evolve(found, result=evolve(found.result, metrics=metrics)), plain, before)

    @pytest.mark.parametrize("arrangement", REORDERED)
    def test_update_does_not_depend_on_the_microbatches(
        self, open_trainer: OpenTrainer, baseline_run: BaselineRun, arrangement: Arrangement
    ) -> None:
        """Microbatch size, packing and order change loss, gradient norm and new weights by rounding alone."""
        with open_trainer() as trainer:
            found = trainer.outcome(arrange(baseline_run.batch, arrangement))
        assert_same_step(found, baseline_run.steps[0], baseline_run.before)

    def test_microbatch_without_loss_tokens_adds_nothing(self, open_trainer: OpenTrainer, baseline_run: BaselineRun) -> None:
        """Ranks have equally many microbatches, so some may hold nothing to learn."""
        empty = without_loss(baseline_run.other)
        with open_trainer() as trainer:
            found = trainer.outcome((empty, baseline_run.batch, empty))
        assert_same_step(found, baseline_run.steps[0], baseline_run.before)

    def test_tokens_after_the_last_loss_token_get_no_gradient(
        self, open_trainer: OpenTrainer, reference: Reference, batch: TokenBatch, baseline_run: BaselineRun
    ) -> None:
        """Other tokens in their place change nothing."""
        tokens = batch.tokens.copy()
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            num_after = int(np.argmax(batch.loss_mask[start:end][::-1])) if batch.loss_mask[start:end].any() else end - start
            tokens[end - num_after : end] = (tokens[end - num_after : end] + 1) % reference.vocab_size
        assert (tokens != batch.tokens).sum() >= 3, "the batch has too few tokens after its last loss tokens"
        with open_trainer() as trainer:
            found = trainer.outcome((evolve(batch, tokens=tokens),))
        assert_same_step(found, baseline_run.steps[0], baseline_run.before)

    def test_losses_are_divided_by_the_global_counts(self, open_trainer: OpenTrainer, batch: TokenBatch) -> None:
        """With counts three times those of the rank's own microbatches, loss and gradient are a third."""
        with open_trainer() as trainer:
            expected = trainer.step(arrange(batch, "apart"))
        with open_trainer() as trainer:
            found = trainer.step(arrange(batch, "apart"), counts=scaled_counts(batch, 3))
        assert_close("loss", found.loss, expected.loss / 3, trainer.tolerance / 10)
        assert_close("grad_norm", found.grad_norm, expected.grad_norm / 3, trainer.tolerance)

    def test_steps_go_downhill(self, trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """The loss falls from step to step on the same batch."""
        losses = [trainer.step((batch,), weight_version=version).loss for version in range(6)]
        assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]} in five steps on one batch"

    def test_learning_rate_is_the_one_used(self, trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """It is positive within the first steps, and weights move exactly where it is."""
        rates = []
        for version in range(4):
            before = trainer.weights(version)
            outcome = trainer.outcome((batch,), version)
            moved = any((outcome.weights[name] != before[name]).any() for name in before)
            rates.append(outcome.result.learning_rate)
            assert moved == (rates[-1] > 0.0), f"learning rate {rates[-1]}, yet weights {'moved' if moved else 'stayed'}"
        assert min(rates) >= 0.0
        assert max(rates) > 0.0, f"found learning rates {rates}; expected one above 0 within the first steps"

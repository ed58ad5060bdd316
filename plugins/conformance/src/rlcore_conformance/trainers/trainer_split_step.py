"""Checks of the capability `split_step`: pieces of a step and their update equal one train_step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    ContractError,
    ForwardBackwardResult,
    LossSpec,
    NonFiniteError,
    OptimizerSpec,
    OptimStepRequest,
    Provider,
    ScheduleSpec,
    TokenBatch,
    TrainStepResult,
    capabilities,
)
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainers.batches import counts_of, spoiled
from rlcore_conformance.trainers.pieces import piece_of, step_in_pieces, without_metrics
from rlcore_conformance.trainers.step_outcome import StepOutcome, assert_same_step
from rlcore_conformance.trainers.trainer_fixtures import (
    BaselineRun,
    OpenTrainer,
    TrainerFixtures,
    TrainerUnderTest,
    with_loss,
)

Pieces = Sequence[tuple[TokenBatch, ...]]


class TrainerSplitStep(TrainerFixtures):
    """The contract of `forward_backward` and `optim_step`."""

    def test_pieces_equal_one_step(self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun) -> None:
        """Three steps: of one piece, of another, and of both."""
        require(provider, capabilities.SPLIT_STEP)
        run = baseline_run
        steps: list[Pieces] = [[(run.batch,)], [(run.other,)], [(run.batch,), (run.other,)]]
        before = run.before
        with open_trainer() as trainer:
            for version, (pieces, expected) in enumerate(zip(steps, run.steps, strict=True)):
                assert_same_update(outcome_of(trainer, pieces, version), expected, before)
                before = expected.weights

    def test_piece_returns_figures_of_its_tokens(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun
    ) -> None:
        """Metrics as a step reports them, and the log-probabilities that the loss gets."""
        require(provider, capabilities.SPLIT_STEP)
        batch = baseline_run.batch
        with open_trainer() as trainer:
            expected = trainer.logprobs((batch,))
            wants = capabilities.STEP_LOGPROBS in provider.capabilities
            result = forward_backward(trainer, (batch,), logprobs=wants)
            if wants:
                assert result.logprobs is not None
                trainer.assert_near(result.logprobs[0], expected[0], "log-probabilities of the piece")
            trainer.assert_loss(as_step(result), baseline_run.steps[0].result.loss, baseline_run.steps[0].result.metrics)

    @pytest.mark.parametrize(
        "settings",
        [
            {"learning_rate": 3e-4},
            {"betas": (0.5, 0.6)},
            {"weight_decay": 100.0},
            {"eps": 1e-2},
            {"max_grad_norm": 1e-4, "eps": 1e-3},
        ],
        ids=lambda settings: next(iter(settings)),
    )
    def test_settings_are_those_of_the_step(
        self, provider: Provider, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch, settings: Any
    ) -> None:
        """Two steps with settings of their own, and one with the recipe's behind them, where betas tell them apart."""
        require(provider, capabilities.SPLIT_STEP)
        with open_trainer(optimizer=evolve(optimizer, **settings)) as trainer:
            before = trainer.weights()
            expected = [trainer.outcome((batch,), version) for version in range(2)]
        with open_trainer() as trainer:
            for version in range(2):
                assert_same_update(outcome_of(trainer, [(batch,)], version, **settings), expected[version], before)
                before = expected[version].weights
            after = trainer.step((batch,), 2).learning_rate
        assert after == optimizer.learning_rate, f"a step behind them: found rate {after}; expected the recipe's"

    def test_schedule_sets_the_rate_of_a_step_that_names_none(
        self, provider: Provider, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch
    ) -> None:
        """The warm-up's second of four steps."""
        require(provider, capabilities.SPLIT_STEP)
        with open_trainer(schedule=ScheduleSpec(warmup_steps=4)) as trainer:
            outcome_of(trainer, [(batch,)], 0)
            found = outcome_of(trainer, [(batch,)], 1).result.learning_rate
        assert found == pytest.approx(optimizer.learning_rate / 2, rel=1e-6)

    @pytest.mark.parametrize("then", ["piece", "step"])
    def test_gradients_of_an_abandoned_step_are_dropped(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun, then: str
    ) -> None:
        """The first piece of the next step drops them, and so does train_step."""
        require(provider, capabilities.SPLIT_STEP)
        with open_trainer() as trainer:
            forward_backward(trainer, (baseline_run.other,))
            batch = (baseline_run.batch,)
            found = outcome_of(trainer, [batch], 0) if then == "piece" else trainer.outcome(batch)
            assert_same_update(found, baseline_run.steps[0], baseline_run.before)

    def test_failed_piece_drops_all(self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun) -> None:
        """A loss that is not finite; the step cannot be ended, and one that begins anew is right."""
        require(provider, capabilities.SPLIT_STEP)
        with open_trainer() as trainer:
            forward_backward(trainer, (baseline_run.other,))
            with pytest.raises(NonFiniteError):
                forward_backward(trainer, (spoiled(baseline_run.batch),), piece=1)
            with pytest.raises(ContractError):
                trainer.handle.optim_step(OptimStepRequest(pieces=1, weight_version=0))
            found = outcome_of(trainer, [(baseline_run.batch,)], 0)
            assert_same_update(found, baseline_run.steps[0], baseline_run.before)

    def test_gradient_that_is_not_finite_leaves_the_weights(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun, loss: LossSpec
    ) -> None:
        """optim_step refuses it, and the next step is right."""
        require(provider, capabilities.SPLIT_STEP)
        with open_trainer() as trainer:
            forward_backward(trainer, (baseline_run.batch,), loss=with_loss(loss, poison_gradient=True))
            with pytest.raises(NonFiniteError):
                trainer.handle.optim_step(OptimStepRequest(pieces=1, weight_version=0))
            for name, weight in trainer.weights().items():
                np.testing.assert_array_equal(weight, baseline_run.before[name], err_msg=f"after a refused step: {name}")
            found = outcome_of(trainer, [(baseline_run.batch,)], 0)
            assert_same_update(found, baseline_run.steps[0], baseline_run.before)

    def test_calls_between_pieces_leave_the_gradients(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun, tmp_path: Path
    ) -> None:
        """Log-probabilities, an export and a checkpoint."""
        require(provider, capabilities.SPLIT_STEP)
        run = baseline_run
        both = counts_of((run.batch, run.other))
        with open_trainer() as trainer:
            trainer.step((run.batch,))
            trainer.step((run.other,), 1)
            forward_backward(trainer, (run.batch,), 2, counts=both)
            trainer.logprobs((run.other,), 2)
            trainer.weights(2)
            trainer.save(tmp_path)
            forward_backward(trainer, (run.other,), 2, piece=1, counts=both)
            found = trainer.handle.optim_step(OptimStepRequest(pieces=2, weight_version=2))
            weights = trainer.weights(3)
        result = evolve(run.steps[2].result, grad_norm=found.grad_norm)
        outcome = StepOutcome(result=result, weights=weights, tolerance=run.steps[2].tolerance)
        assert_same_update(outcome, run.steps[2], run.steps[1].weights)

    def test_load_without_the_optimizer_begins_it_anew(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun, tmp_path: Path
    ) -> None:
        """Two steps at rate 0 fill the moments of a checkpoint; the step behind it is as a first one."""
        require(provider, capabilities.SPLIT_STEP)
        run = baseline_run
        with open_trainer() as trainer:
            for version in range(2):
                outcome_of(trainer, [(run.other,)], version, learning_rate=0.0)
            trainer.save(tmp_path)
        with open_trainer() as trainer:
            assert trainer.load(tmp_path, optimizer=False) == 2
            found = outcome_of(trainer, [(run.batch,)], 2)
            found = evolve(found, result=evolve(found.result, weight_version=1))
            assert_same_update(found, run.steps[0], run.before)


def forward_backward(
    trainer: TrainerUnderTest, batches: tuple[TokenBatch, ...], weight_version: int = 0, *, piece: int = 0, **options: Any
) -> ForwardBackwardResult:
    """The gradients of a piece; `options` are those of TrainerUnderTest.request."""
    return trainer.handle.forward_backward(piece_of(trainer.request(batches, weight_version, **options), batches, piece))


def outcome_of(trainer: TrainerUnderTest, pieces: Pieces, weight_version: int, **settings: Any) -> StepOutcome:
    """A step of some pieces; `settings` are fields of OptimStepRequest."""
    step = trainer.request(tuple(batch for piece in pieces for batch in piece), weight_version)
    return trainer.after(step_in_pieces(trainer.handle, step, [len(piece) for piece in pieces], **settings))


def as_step(piece: ForwardBackwardResult) -> TrainStepResult:
    """A piece's figures as those of a step without an update."""
    return TrainStepResult(
        weight_version=piece.weight_version, loss=piece.loss, grad_norm=0.0, learning_rate=0.0, metrics=piece.metrics
    )


def assert_same_update(found: StepOutcome, expected: StepOutcome, before: Values) -> None:
    """Loss, norm, learning rate and weights are those of one train_step."""
    found, expected = (evolve(one, result=without_metrics(one.result)) for one in (found, expected))
    assert_same_step(found, expected, before)

"""Checks of a trainer whose model ends in one linear output a token."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.spi import (
    ADVANTAGES,
    LossSpec,
    ModelSpec,
    Provider,
    TokenBatch,
    TrainerContext,
    capabilities,
)
from rlcore.spi.weights import VALUE_HEAD_WEIGHT
from rlcore_conformance.references.fixtures import Device, require
from rlcore_conformance.references.probe import ValueProbeConfig, expected_value_probe
from rlcore_conformance.references.reference import Reference, ReferenceValues, reference_values
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainers.batches import ARRANGEMENTS, LONG_LENGTHS, Arrangement, arrange, arranged, make_batch
from rlcore_conformance.trainers.rank_script import RankJob
from rlcore_conformance.trainers.step_outcome import assert_norms_add_up, assert_same_names
from rlcore_conformance.trainers.trainer_fixtures import OpenTrainer, TrainerFixtures, TrainerUnderTest, assert_resumes
from rlcore_conformance.trainers.trainer_ranks import alone, assert_one_trainer, of, require_devices, shared, travelling


class TrainerValues(TrainerFixtures):
    """A head of values begins where its directory says, learns by its loss, and is kept in checkpoints and exports."""

    @pytest.fixture
    def value_loss(self, value_loss_path: str) -> LossSpec:
        """The probe loss of values."""
        return LossSpec(path=value_loss_path, config=ValueProbeConfig(), token_columns=(ADVANTAGES,))

    @pytest.fixture
    def open_values(self, open_trainer: OpenTrainer, value_model: ModelSpec, value_loss: LossSpec) -> OpenTrainer:
        """Opens a fresh trainer of the model that holds a head of values."""

        @contextmanager
        def opened(**changes: Any) -> Iterator[TrainerUnderTest]:
            with open_trainer(**{"model": value_model, "head": "value", "needs_reference": False, **changes}) as trainer:
                yield evolve(trainer, loss=value_loss)

        return opened

    @pytest.fixture
    def value_trainer(self, provider: Provider, open_values: OpenTrainer) -> Iterator[TrainerUnderTest]:
        """A fresh trainer of the model that holds a head of values."""
        require(provider, capabilities.VALUE_HEAD)
        with open_values() as trainer:
            yield trainer

    def test_values_begin_at_zero(
        self, provider: Provider, open_values: OpenTrainer, model: ModelSpec, batch: TokenBatch
    ) -> None:
        """A directory without a head of values begins with one of zeros; the first step moves it."""
        require(provider, capabilities.VALUE_HEAD)
        with open_values(model=model) as trainer:
            (before,) = trainer.values((batch,))
            assert not before.any(), "values of a head that nothing has trained"
            assert not trainer.weights()[VALUE_HEAD_WEIGHT].any()
            trainer.step((batch,))
            (after,) = trainer.values((batch,), 1)
            assert after.any(), "the head did not move"

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_values_equal_the_reference(
        self,
        value_trainer: TrainerUnderTest,
        value_reference: Callable[[Values], ReferenceValues],
        batch: TokenBatch,
        arrangement: Arrangement,
    ) -> None:
        """After every token, the first and the last of a sequence too, whatever the loss mask says; also of long sequences."""
        model = value_reference(value_trainer.weights())
        long = make_batch(int(batch.tokens.max()) + 1, seed=4, lengths=LONG_LENGTHS)
        expected = arranged(reference_values(model, batch), batch, arrangement), reference_values(model, long)
        found = value_trainer.values((*arrange(batch, arrangement), long))
        for part, wanted in zip(found, (*expected[0], expected[1]), strict=True):
            value_trainer.assert_near(part, wanted)

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_loss_and_gradient_of_values_equal_the_reference(
        self,
        value_trainer: TrainerUnderTest,
        value_reference: Callable[[Values], ReferenceValues],
        batch: TokenBatch,
        arrangement: Arrangement,
    ) -> None:
        """Through the head and all that is below it; log-probabilities are zeros."""
        model = value_reference(value_trainer.weights())
        result = value_trainer.step(arrange(batch, arrangement), temperature=0.7)
        value_trainer.assert_loss(result, *expected_value_probe(batch, reference_values(model, batch)))
        value_trainer.assert_grad_norm(result, model.gradient_norm(batch, value_trainer.loss))

    def test_norms_of_gradients_have_the_head_among_them(self, value_trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """Each tensor of the export has one, which make up that of the whole gradient."""
        value_trainer.require(capabilities.GRADIENT_NORMS)
        result = value_trainer.step((batch,), gradient_norms=True)
        assert_norms_add_up(result)
        assert result.gradient_norms is not None
        assert_same_names("gradient_norms", result.gradient_norms, value_trainer.weights(1))

    def test_resumed_values_take_the_step_that_would_have_followed(
        self, value_trainer: TrainerUnderTest, open_values: OpenTrainer, batch: TokenBatch, tmp_path: Path
    ) -> None:
        """Head, moments and versions come back."""
        assert_resumes(value_trainer, open_values, batch, tmp_path)

    def test_two_ranks_are_one_trainer_of_values(
        self,
        provider: Provider,
        rank_config: Any,
        trainer_context: TrainerContext,
        value_model: ModelSpec,
        value_trainer: TrainerUnderTest,
        reference: Reference,
        device: Device,
        tmp_path: Path,
    ) -> None:
        """Updates, figures, values, exports and a checkpoint; ranks agree on each."""
        require(provider, capabilities.MULTI_RANK)
        require_devices(device)
        batch, other = make_batch(reference.vocab_size, seed=1), make_batch(reference.vocab_size, seed=3)
        job = RankJob(
            provider=travelling(provider),
            config=rank_config,
            context=evolve(trainer_context, model=value_model, head="value", needs_reference=False),
            tolerance=value_trainer.tolerance,
            directory=tmp_path,
            steps=(
                shared(value_trainer, ((batch.select(of(4, 5)),), (batch.select(of(0, 1, 2, 3)),)), 0),
                shared(
                    value_trainer, ((other,), (batch,)), 1, gradient_norms=capabilities.GRADIENT_NORMS in provider.capabilities
                ),
            ),
            splits=False,
            refused={},
        )
        one = alone(value_trainer, job)
        value_trainer.handle.close()
        assert_one_trainer(job, one)

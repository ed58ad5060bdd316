"""Checks of the capability `gradient_norms`: the norm of each tensor's gradient.

With an eps far above all gradients AdamW's first step is the gradient itself times a factor. So each norm is compared with the
length of the tensor's update.
"""

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    LoraSpec,
    OptimizerSpec,
    Provider,
    TokenBatch,
    TrainStepResult,
    capabilities,
)
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.tensors import collect
from rlcore_conformance.trainers.batches import ARRANGEMENTS, Arrangement, arrange
from rlcore_conformance.trainers.pieces import step_in_pieces
from rlcore_conformance.trainers.step_outcome import assert_norms_add_up, assert_same_names, assert_same_step
from rlcore_conformance.trainers.trainer_fixtures import (
    BaselineRun,
    OpenTrainer,
    TrainerFixtures,
    export_request,
)


class TrainerGradientNorms(TrainerFixtures):
    """The contract of TrainStepResult.gradient_norms."""

    @pytest.mark.parametrize("arrangement", ARRANGEMENTS)
    def test_norms_are_those_of_the_tensors_gradients(
        self,
        provider: Provider,
        open_trainer: OpenTrainer,
        optimizer: OptimizerSpec,
        baseline_run: BaselineRun,
        arrangement: Arrangement,
    ) -> None:
        """Before clipping, here to a fourth, in however many microbatches. A tensor without a norm does not train, or is tied
        to one with a norm."""
        require(provider, capabilities.GRADIENT_NORMS)
        total = baseline_run.steps[0].result.grad_norm
        limit = total / 4
        # The update is the clipped gradient divided by `limit`, with a norm of 1.
        spec = evolve(optimizer, learning_rate=1e4, eps=1e4 * limit, weight_decay=0.0, max_grad_norm=limit)
        with open_trainer(optimizer=spec) as trainer:
            found = trainer.outcome(arrange(baseline_run.batch, arrangement), gradient_norms=True)
        norms = norms_of(found.result)
        assert_norms_add_up(found.result)
        before, after = baseline_run.before, found.weights
        unknown = sorted(norms.keys() - after.keys())
        assert not unknown, f"gradient_norms: found {unknown}, which exports do not have; expected names of {sorted(after)}"
        for name, norm in norms.items():
            length = float(np.linalg.norm(after[name].astype(np.float64) - before[name]))
            allowed = trainer.gradient_tolerance * max(length, 1e-2) + 1e-6 * float(np.linalg.norm(before[name]))
            assert abs(norm / total - length) <= allowed, (
                f"{name}: found the norm {norm:.6g}; expected {length * total:.6g}, since the tensor's update is {length:.6g} "
                f"of the whole, whose gradient has the norm {total:.6g}"
            )
        for name in after.keys() - norms.keys():
            twins = [other for other in norms if np.array_equal(after[other], after[name])]
            assert twins or np.array_equal(after[name], before[name]), f"{name} moved, and gradient_norms has none of it"

    def test_step_with_norms_is_the_step_without(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun
    ) -> None:
        """Nothing else changes, and the next step brings no norms unasked."""
        require(provider, capabilities.GRADIENT_NORMS)
        with open_trainer() as trainer:
            asked = trainer.outcome((baseline_run.batch,), 0, gradient_norms=True)
            assert_same_step(asked, baseline_run.steps[0], baseline_run.before)
            assert_same_step(trainer.outcome((baseline_run.other,), 1), baseline_run.steps[1], asked.weights)

    def test_norms_of_pieces_are_those_of_the_step(
        self, provider: Provider, open_trainer: OpenTrainer, baseline_run: BaselineRun
    ) -> None:
        """optim_step returns the norms of the sum of all pieces' gradients."""
        require(provider, capabilities.GRADIENT_NORMS)
        require(provider, capabilities.SPLIT_STEP)
        batches = baseline_run.batch, baseline_run.other
        with open_trainer() as trainer:
            expected = norms_of(trainer.step(batches, gradient_norms=True))
        with open_trainer() as trainer:
            result = step_in_pieces(trainer.handle, trainer.request(batches, gradient_norms=True))
        found = norms_of(result)
        assert_norms_add_up(result)
        assert_same_names("gradient_norms", found, expected)
        for name, norm in expected.items():
            assert found[name] == pytest.approx(norm, rel=trainer.gradient_tolerance, abs=1e-6), name

    def test_norms_of_adapters_are_those_of_their_factors(
        self, provider: Provider, open_trainer: OpenTrainer, batch: TokenBatch
    ) -> None:
        """A has no gradient in the first step, since B is 0."""
        require(provider, capabilities.GRADIENT_NORMS)
        require(provider, capabilities.LORA)
        require(provider, capabilities.ADAPTER_REFIT)
        with open_trainer(lora=LoraSpec(rank=3, alpha=6.0)) as trainer:
            results = [trainer.step((batch,), version, gradient_norms=True) for version in range(2)]
            names = collect(trainer.handle.export_weights(export_request(2, adapters="alone")))
        for result in results:
            assert_norms_add_up(result)
            assert_same_names("gradient_norms", norms_of(result), names)
        begun = {name for name, norm in norms_of(results[0]).items() if norm > 0.0}
        assert begun == {name for name in names if name.endswith("lora_B.weight")}
        assert all(norm > 0.0 for norm in norms_of(results[1]).values())


def norms_of(result: TrainStepResult) -> dict[str, float]:
    """The norms of a step that was asked for them."""
    assert result.gradient_norms is not None
    return dict(result.gradient_norms)

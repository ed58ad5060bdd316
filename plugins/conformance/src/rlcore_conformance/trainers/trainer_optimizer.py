"""Checks that a trainer optimizes as its context says: by AdamW, with the schedule's learning rates.

No gradient is seen from outside, so updates of the weights are compared with one another, or with what AdamW makes of any
gradient.
"""

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import OptimizerSpec, Provider, ScheduleSpec, TokenBatch, capabilities
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.reference import Float64Array, Reference
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainers.batches import arrange, make_batch, scaled_counts
from rlcore_conformance.trainers.trainer_fixtures import OpenTrainer, TrainerFixtures, TrainerUnderTest

SCHEDULES = {
    "constant": (ScheduleSpec(), (1.0, 1.0, 1.0)),
    "warm-up": (ScheduleSpec(warmup_steps=4), (0.25, 0.5, 0.75, 1.0, 1.0)),
    "linear": (ScheduleSpec(warmup_steps=2, decay="linear", min_learning_rate_ratio=0.2), (0.5, 1.0, 1.0, 0.8, 0.6, 0.4)),
    "cosine": (ScheduleSpec(warmup_steps=1, decay="cosine", min_learning_rate_ratio=0.5), (1.0, 1.0, 0.875, 0.625)),
}
"""Schedules, and the share of the peak that each step of a run has, which is as long as its list."""
MOVES = {
    "warm-up": (ScheduleSpec(warmup_steps=2), (0.5, 1.0)),
    "linear": (ScheduleSpec(decay="linear", min_learning_rate_ratio=0.2), (1.0, 0.6)),
    "cosine": (ScheduleSpec(decay="cosine"), (1.0, 0.5)),
}
SMALL = 0.02
"""Share of an update that two runs of the same step may differ by."""


class TrainerOptimizer(TrainerFixtures):
    """The contract of `rlcore.spi.context`."""

    @pytest.mark.parametrize(("schedule", "shares"), SCHEDULES.values(), ids=SCHEDULES)
    def test_learning_rate_follows_the_schedule(
        self,
        open_trainer: OpenTrainer,
        optimizer: OptimizerSpec,
        batch: TokenBatch,
        schedule: ScheduleSpec,
        shares: tuple[float, ...],
    ) -> None:
        """As reported: the rise of the warm-up, the decay from its end to that of the run."""
        with open_trainer(schedule=schedule, num_train_steps=len(shares)) as trainer:
            found = [trainer.step((batch,), version).learning_rate for version in range(len(shares))]
        assert found == pytest.approx([optimizer.learning_rate * share for share in shares], rel=1e-6)

    @pytest.mark.parametrize(("schedule", "shares"), MOVES.values(), ids=MOVES)
    def test_weights_move_by_the_scheduled_rate(
        self,
        open_trainer: OpenTrainer,
        optimizer: OptimizerSpec,
        reference: Reference,
        batch: TokenBatch,
        schedule: ScheduleSpec,
        shares: tuple[float, float],
    ) -> None:
        """After the same first step at a constant rate, the second differs in its length alone."""
        batches = batch, make_batch(reference.vocab_size, seed=3)
        with open_trainer(schedule=schedule, num_train_steps=len(shares)) as trainer:
            found = updates(trainer, *batches)
        with open_trainer(optimizer=evolve(optimizer, learning_rate=shares[0] * optimizer.learning_rate)) as trainer:
            constant = updates(trainer, *batches)
        assert_scaled("the first update", found[0], constant[0], 1.0)
        assert_scaled("the second update", found[1], constant[1], shares[1] / shares[0])

    def test_learning_rate_is_read_at_the_schedules_step(
        self, provider: Provider, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch
    ) -> None:
        """The learning rate follows the schedule's step, which runs ahead of the updates where planned ones were not made."""
        require(provider, capabilities.SCHEDULE_STEP)
        schedule = ScheduleSpec(warmup_steps=8)
        with open_trainer(schedule=schedule, optimizer=evolve(optimizer, weight_decay=0.0)) as trainer:
            before = trainer.weights()
            first = trainer.outcome((batch,), schedule_step=3)
            second = trainer.step((batch,), 1, schedule_step=5)
        found = first.result.learning_rate, second.learning_rate
        rate = optimizer.learning_rate / 2
        assert found == pytest.approx((rate, 0.75 * optimizer.learning_rate), rel=1e-6)
        lengths = np.abs(flat(difference_of(first.weights, before)))
        typical = float(np.median(lengths[lengths > 0.0]))
        assert abs(typical - rate) <= SMALL * rate, f"weights that moved did by {typical:.4g}; expected {rate:.4g}"

    def test_schedule_continues_after_loading(
        self, provider: Provider, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch, tmp_path: Path
    ) -> None:
        """At the step of the run, not at that of the process, and where the trainer can, at the step that the request names."""
        schedule = ScheduleSpec(warmup_steps=4)
        with open_trainer(schedule=schedule) as trainer:
            trainer.step((batch,), 0)
            trainer.step((batch,), 1)
            trainer.save(tmp_path)
        with open_trainer(schedule=schedule) as trainer:
            trainer.load(tmp_path)
            found = trainer.step((batch,), 2).learning_rate
            assert found == pytest.approx(0.75 * optimizer.learning_rate, rel=1e-6)
            if capabilities.SCHEDULE_STEP in provider.capabilities:
                named = trainer.step((batch,), 3, schedule_step=1).learning_rate
                assert named == pytest.approx(0.5 * optimizer.learning_rate, rel=1e-6)

    def test_first_step_is_as_long_as_the_learning_rate(
        self, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch
    ) -> None:
        """The gradient's length does not matter: both moments are corrected for their start, and their quotient is its sign."""
        with open_trainer(optimizer=evolve(optimizer, weight_decay=0.0)) as trainer:
            lengths = np.abs(flat(update_of(trainer, (batch,)))) / optimizer.learning_rate
        assert lengths.max() <= 1.01, f"a weight moved by {lengths.max():.4g} learning rates; expected at most 1"
        typical = float(np.median(lengths[lengths > 0.0]))
        assert abs(typical - 1.0) <= SMALL, f"weights that moved did by {typical:.4g} learning rates; expected 1"

    def test_weight_decay_is_of_matrices_and_apart_from_the_gradient(
        self, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch
    ) -> None:
        """Against the same step without: matrices lose rate · decay of themselves, here a half, and vectors nothing. The rate
        is the step's own, a fourth of the peak."""
        schedule = ScheduleSpec(warmup_steps=4)
        rate = optimizer.learning_rate / 4
        with open_trainer(optimizer=evolve(optimizer, weight_decay=0.0), schedule=schedule) as trainer:
            before = trainer.weights()
            plain = update_of(trainer, (batch,))
        with open_trainer(optimizer=evolve(optimizer, weight_decay=0.5 / rate), schedule=schedule) as trainer:
            decayed = update_of(trainer, (batch,))
        for name, weight in before.items():
            expected = -0.5 * weight if weight.ndim > 1 else np.zeros_like(weight)
            allowed = SMALL * np.linalg.norm(expected) + 0.1 * rate * sqrt(weight.size)
            difference = np.linalg.norm(decayed[name] - plain[name] - expected)
            assert difference <= allowed, (
                f"{name} {weight.shape}: the decay is off by {difference:.3g} of {allowed:.3g} allowed"
            )

    def test_gradients_are_scaled_down_to_the_global_norm(
        self, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch
    ) -> None:
        """All by one factor where their norm is greater than max_grad_norm, and never where that is 0.0. The norm is that of
        the whole step, in however many microbatches."""
        with open_trainer() as trainer:
            norm = trainer.step((batch,)).grad_norm
        # With an eps far above all gradients AdamW's first step is the gradient itself, here with a norm of 0.1.
        spec = evolve(optimizer, learning_rate=10.0, eps=100.0 * norm, weight_decay=0.0)
        found = {}
        for share in (0.0, 4.0, 0.25):
            with open_trainer(optimizer=evolve(spec, max_grad_norm=share * norm)) as trainer:
                found[share] = update_of(trainer, (batch,))
        with open_trainer(optimizer=evolve(spec, max_grad_norm=0.25 * norm)) as trainer:
            apart = update_of(trainer, arrange(batch, "apart"))
        length = np.linalg.norm(flat(found[0.0]))
        # A head that is tied to the embedding may be exported beside it.
        assert 0.098 <= length <= 0.1 * sqrt(2), f"without clipping the update is {length:.4g} long; expected 0.1"
        assert_scaled("the update under a norm that is not reached", found[4.0], found[0.0], 1.0)
        assert_scaled("the update under a fourth of the norm", found[0.25], found[0.0], 0.25)
        assert_scaled("the update under a fourth of the norm, each sequence by itself,", apart, found[0.0], 0.25)

    def test_gradients_keep_their_precision_however_small(
        self, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch
    ) -> None:
        """Counts 2¹⁶-fold make every gradient smaller by that, each tensor's as exactly as before. float16 would lose them."""
        # With an eps far above all gradients AdamW's first step is the gradient itself, here tenfold.
        spec = evolve(optimizer, learning_rate=1e4, eps=1e3, weight_decay=0.0, max_grad_norm=0.0)
        with open_trainer(optimizer=spec) as trainer:
            before = trainer.weights()
            expected = update_of(trainer, (batch,))
        with open_trainer(optimizer=evolve(spec, eps=spec.eps / 2**16)) as trainer:
            found = update_of(trainer, (batch,), counts=scaled_counts(batch, 2**16))
        for name, update in expected.items():
            length, error = np.linalg.norm(update), np.linalg.norm(found[name] - update)
            allowed = 1e-3 * length + 1e-6 * np.linalg.norm(before[name])
            assert error <= allowed, (
                f"{name}: small gradients are off by {error:.3g}; expected at most {allowed:.3g} of {length:.3g}"
            )

    def test_moments_are_kept_in_float32(self, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch) -> None:
        """A second gradient of almost nothing leaves the second update to the moments of the first: the same share of it for
        every weight."""
        beta1, beta2 = 0.9, 0.99
        spec = evolve(optimizer, learning_rate=0.01, betas=(beta1, beta2), eps=1e-15, weight_decay=0.0, max_grad_norm=0.0)
        with open_trainer(optimizer=spec) as trainer:
            first = update_of(trainer, (batch,))
            second = update_of(trainer, (batch,), 1, counts=scaled_counts(batch, 2**20))
        moved = np.abs(flat(first)) > spec.learning_rate / 2
        shares = flat(second)[moved] / flat(first)[moved]
        expected = beta1 / (1 + beta1) / sqrt(beta2 / (1 + beta2))
        error = float(np.median(np.abs(shares / expected - 1)))
        assert error <= 1e-4, f"weights move by shares that are off by {error:.2g}, half of them by more; expected at most 1e-4"

    @pytest.mark.parametrize("betas", [(0.8, 0.5), (0.0, 0.9)])
    def test_moments_decay_by_the_betas(
        self, open_trainer: OpenTrainer, optimizer: OptimizerSpec, batch: TokenBatch, betas: tuple[float, float]
    ) -> None:
        """Counts tenfold make the second gradient a tenth of the first, where weights have hardly moved in between."""
        rate, (beta1, beta2) = 3e-5, betas
        spec = evolve(optimizer, learning_rate=rate, betas=betas, weight_decay=0.0, max_grad_norm=0.0)
        with open_trainer(optimizer=spec) as trainer:
            first = update_of(trainer, (batch,))
            second = update_of(trainer, (batch,), 1, counts=scaled_counts(batch, 10))
        moved = np.abs(flat(first)) > rate / 2
        found = float(np.median(np.abs(flat(second))[moved])) / rate
        expected = (beta1 + 0.1) / (1 + beta1) / sqrt((beta2 + 0.01) / (1 + beta2))
        assert abs(found - expected) <= 0.03 * expected, (
            f"the second update is {found:.4g} learning rates long; expected {expected:.4g}"
        )


def update_of(trainer: TrainerUnderTest, batches: tuple[TokenBatch, ...], version: int = 0, **options: Any) -> Values:
    """The difference that a step makes to the weights."""
    before = trainer.weights(version)
    return difference_of(trainer.outcome(batches, version, **options).weights, before)


def updates(trainer: TrainerUnderTest, *batches: TokenBatch) -> list[Values]:
    """The differences that steps make to the weights, from the first on."""
    return [update_of(trainer, (batch,), version) for version, batch in enumerate(batches)]


def difference_of(after: Values, before: Values) -> Values:
    """Return the difference of two sets of tensors, by name."""
    return {name: value - before[name] for name, value in after.items()}


def flat(values: Values) -> Float64Array:
    """float64: all numbers, one after the other."""
    return np.concatenate([value.ravel() for value in values.values()]).astype(np.float64)


def assert_scaled(what: str, found: Values, expected: Values, scale: float) -> None:
    """`found` is `scale` times `expected`, direction included."""
    goal = scale * flat(expected)
    difference, length = np.linalg.norm(flat(found) - goal), np.linalg.norm(goal)
    assert difference <= SMALL * length, f"{what} differs by {difference:.3g} from the expected one, {length:.3g} long"

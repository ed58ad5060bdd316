"""Checks of a trainer's Muon, of moments in 8 bits, and of settings by the names of tensors.

The gradient is what AdamW's first step makes of it with an eps far above: a multiple of it. Shapes: A rows and B columns.
"""

from math import sqrt
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ConfigError, ModelSpec, MuonSpec, OptimizerGroup, OptimizerSpec, Provider, TokenBatch, capabilities
from rlcore.spi.arrays import AnyArray
from rlcore_conformance.references.fixtures import require, tiny_model
from rlcore_conformance.references.reference import Float64Array, Reference
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainers.batches import make_batch, scaled_counts
from rlcore_conformance.trainers.trainer_fixtures import OpenTrainer, TrainerFixtures, assert_resumes
from rlcore_conformance.trainers.trainer_optimizer import SMALL, flat, update_of, updates

ROUNDED = 0.3
"""Share of an orthogonalized update that rounding to bfloat16 may change."""
COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""The iteration's of torch.optim.Muon."""
LEAST_8BIT = 4096
"""Elements of the smallest tensor whose moments are kept in 8 bits."""


class TrainerOptimizerKinds(TrainerFixtures):
    """The contract of `[optimizer]` beyond AdamW with one setting."""

    @pytest.fixture
    def muon(self, provider: Provider, optimizer: OptimizerSpec) -> OptimizerSpec:
        """Muon without decay and clipping."""
        require(provider, capabilities.MUON)
        return evolve(optimizer, name="muon", weight_decay=0.0, max_grad_norm=0.0)

    @pytest.fixture
    def wide_model(self, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
        """A model with matrices of 4096 elements and more."""
        return tiny_model(tmp_path_factory, seed=0, hidden_size=64)

    @pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
    def test_muon_orthogonalizes_each_matrix(
        self,
        open_trainer: OpenTrainer,
        muon: OptimizerSpec,
        batch: TokenBatch,
        scale: Literal["match_rms_adamw", "original"],
    ) -> None:
        """Each matrix of a layer by itself, as the checkpoint names it; all else moves as by AdamW."""
        gradients, spec = gradients_of(open_trainer, muon, batch), evolve(muon, muon=MuonSpec(scale=scale))
        with open_trainer(optimizer=spec) as trainer:
            found = update_of(trainer, (batch,))
        for name, gradient in gradients.items():
            if is_matrix(name, gradient):
                assert_orthogonalized(name, found[name], gradient, spec)
            else:
                longest = float(np.abs(found[name]).max()) / muon.learning_rate
                assert longest <= 1.01, f"{name}: a weight moved by {longest:.4g} learning rates; expected at most AdamW's 1"

    def test_muon_keeps_a_mean_of_gradients(
        self, open_trainer: OpenTrainer, muon: OptimizerSpec, reference: Reference, batch: TokenBatch
    ) -> None:
        """After a second gradient of almost nothing, of other sequences, matrices move once more as they did."""
        other = make_batch(reference.vocab_size, seed=3)
        gradients = gradients_of(open_trainer, muon, batch)
        with open_trainer(optimizer=muon) as trainer:
            trainer.step((batch,))
            second = update_of(trainer, (other,), 1, counts=scaled_counts(other, 2**40))
        for name, gradient in gradients.items():
            if is_matrix(name, gradient) and gradient.any():  # an expert without tokens has no mean
                assert_orthogonalized(name, second[name], gradient, muon)

    def test_muon_decays_matrices_apart_from_the_gradient(
        self, open_trainer: OpenTrainer, muon: OptimizerSpec, batch: TokenBatch
    ) -> None:
        """Against the same step without: matrices lose rate · decay of themselves, here a half, and vectors nothing."""
        with open_trainer(optimizer=muon) as trainer:
            before, plain = trainer.weights(), update_of(trainer, (batch,))
        with open_trainer(optimizer=evolve(muon, weight_decay=0.5 / muon.learning_rate)) as trainer:
            decayed = update_of(trainer, (batch,))
        for name, weight in before.items():
            expected = -0.5 * weight if weight.ndim > 1 else np.zeros_like(weight)
            error = np.linalg.norm(decayed[name] - plain[name] - expected)
            allowed = SMALL * np.linalg.norm(expected) + 0.1 * muon.learning_rate * sqrt(weight.size)
            assert error <= allowed, f"{name}: the decay is off by {error:.3g}; expected at most {allowed:.3g}"

    def test_moments_in_8_bits_are_near_those_in_float32(
        self, provider: Provider, open_trainer: OpenTrainer, optimizer: OptimizerSpec, wide_model: ModelSpec, batch: TokenBatch
    ) -> None:
        """A second gradient of almost nothing leaves the second update to the moments of the first: rounded for matrices of
        4096 elements and more, and float32 for vectors."""
        require(provider, capabilities.MOMENTS_8BIT)
        (beta1, beta2), rate = (0.9, 0.99), 0.01
        spec = evolve(optimizer, learning_rate=rate, betas=(beta1, beta2), eps=1e-15, weight_decay=0.0, max_grad_norm=0.0)
        with open_trainer(model=wide_model, optimizer=evolve(spec, moments="8bit")) as trainer:
            first = update_of(trainer, (batch,))
            second = update_of(trainer, (batch,), 1, counts=scaled_counts(batch, 2**20))
        expected = beta1 / (1 + beta1) / sqrt(beta2 / (1 + beta2))
        for are_rounded, bounds in ((True, (1e-4, 0.2)), (False, (0.0, 1e-4))):
            names = [name for name, value in first.items() if (value.ndim > 1 and value.size >= LEAST_8BIT) == are_rounded]
            of_kind = [name for name in names if are_rounded or first[name].ndim == 1]
            both = [flat({name: updates[name] for name in of_kind}) for updates in (first, second)]
            moved = np.abs(both[0]) > rate / 2
            error = float(np.median(np.abs(both[1][moved] / both[0][moved] / expected - 1)))
            kind = "matrices" if are_rounded else "vectors"
            assert bounds[0] <= error <= bounds[1], f"{kind} move by shares that are off by {error:.2g}; expected {bounds}"

    @pytest.mark.parametrize("kind", ["muon", "8bit"])
    def test_run_resumes_with_its_state(
        self,
        provider: Provider,
        open_trainer: OpenTrainer,
        optimizer: OptimizerSpec,
        wide_model: ModelSpec,
        batch: TokenBatch,
        tmp_path: Path,
        kind: str,
    ) -> None:
        """The step after loading is the one that would have followed."""
        require(provider, capabilities.MUON if kind == "muon" else capabilities.MOMENTS_8BIT)
        spec = evolve(optimizer, name="muon") if kind == "muon" else evolve(optimizer, moments="8bit")
        with open_trainer(model=wide_model, optimizer=spec) as trainer:
            assert_resumes(trainer, lambda: open_trainer(model=wide_model, optimizer=spec), batch, tmp_path)

    def test_groups_have_their_own_settings(
        self, provider: Provider, open_trainer: OpenTrainer, optimizer: OptimizerSpec, reference: Reference, batch: TokenBatch
    ) -> None:
        """The first group with a pattern that matches counts; unset keys are the table's, and so is all that none matches."""
        require(provider, capabilities.OPTIMIZER_GROUPS)
        spec = evolve(optimizer, weight_decay=0.0, max_grad_norm=0.0)
        batches = batch, make_batch(reference.vocab_size, seed=3)
        with open_trainer(optimizer=spec) as trainer:
            names = [name for name in trainer.weights() if ".layers." in name]
            plain = updates(trainer, *batches)
        halved, decayed, remembering = names[0], next(name for name in names[1:] if plain[0][name].ndim > 1), names[-1]
        rate = spec.learning_rate
        groups = (
            OptimizerGroup(parameters=(halved,), learning_rate=rate / 2),
            OptimizerGroup(parameters=(f"{halved[:-1]}?", decayed), weight_decay=0.5 / rate),
            OptimizerGroup(parameters=(f"*{remembering.split('.layers.')[1]}",), betas=(0.0, 0.999)),
        )
        with open_trainer(optimizer=evolve(spec, groups=groups)) as trainer:
            before = trainer.weights()
            first, second = updates(trainer, *batches)
        for name, update in plain[0].items():
            share = 0.5 if name == halved else 1.0
            expected = share * update - (0.5 * before[name] if name == decayed else 0.0)
            error, allowed = np.linalg.norm(first[name] - expected), SMALL * np.linalg.norm(expected)
            assert error <= allowed, f"{name}: the update is off by {error:.3g}; expected at most {allowed:.3g}"
        moved = np.linalg.norm(second[remembering] - plain[1][remembering])
        assert moved > SMALL * np.linalg.norm(plain[1][remembering]), f"{remembering}: the betas of its group change nothing"

    def test_pattern_without_a_tensor_is_refused(
        self, provider: Provider, open_trainer: OpenTrainer, optimizer: OptimizerSpec
    ) -> None:
        """A ConfigError when it is built, where no check could see the model."""
        require(provider, capabilities.OPTIMIZER_GROUPS)
        groups = (OptimizerGroup(parameters=("no.tensor.has.this.name",), learning_rate=1e-4),)
        with pytest.raises(ConfigError), open_trainer(optimizer=evolve(optimizer, groups=groups)):
            raise AssertionError("the trainer took a pattern that matches none of its tensors")


def is_matrix(name: str, value: AnyArray) -> bool:
    """Return whether a tensor is a weight matrix of a layer."""
    return ".layers." in name and value.ndim == 2


def gradients_of(open_trainer: OpenTrainer, spec: OptimizerSpec, batch: TokenBatch) -> Values:
    """Multiples of the gradients of a batch: what AdamW's first step makes of them."""
    with open_trainer(optimizer=evolve(spec, name="adamw", learning_rate=1e4, eps=1e3)) as trainer:
        return update_of(trainer, (batch,))


def assert_orthogonalized(name: str, found: AnyArray, gradient: AnyArray, spec: OptimizerSpec) -> None:
    """Assert that an update is that of Muon for a matrix with a multiple of this gradient."""
    scale = (spec.muon or MuonSpec()).scale
    expected = spec.learning_rate * factor(gradient.shape, scale) * orthogonalized(gradient.astype(np.float64))
    error = distance(found, expected)
    assert error <= ROUNDED, f"{name}: the update is off by {error:.3g} of it; expected at most {ROUNDED}"


def distance(found: AnyArray, expected: Float64Array) -> float:
    """What two updates [A, B] are apart by, as a share of the expected one, in the directions of its singular values above half
    of the largest. In the others iterations lift the rounding of what is next to nothing."""
    left, sizes, right = np.linalg.svd(expected, full_matrices=False)
    kept = sizes > 0.5 * sizes[0]
    apart = left[:, kept].T @ (found - expected) @ right[kept].T
    return float(np.linalg.norm(apart) / max(float(np.linalg.norm(sizes[kept])), 1e-30))


def factor(shape: tuple[int, ...], scale: str) -> float:
    """The factor of the learning rate for a matrix [A, B] (MuonSpec.scale)."""
    rows, columns = shape
    return 0.2 * sqrt(max(rows, columns)) if scale == "match_rms_adamw" else sqrt(max(1.0, rows / columns))


def orthogonalized(gradient: Float64Array) -> Float64Array:
    """float64 [A, B]: five iterations of Newton and Schulz, as torch.optim.Muon has them."""
    a, b, c = COEFFICIENTS
    current = gradient / max(float(np.linalg.norm(gradient)), 1e-7)
    for _ in range(5):
        gram = current @ current.T
        current = a * current + (b * gram + c * gram @ gram) @ current
    return current

"""The conformance kit set up for the fakes, and for what is built from them: their reference is a naive one in numpy."""

from collections.abc import Callable, Mapping
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlcore.spi import GlobalCounts, LoraSpec, LossInputs, LossSpec, ModelSpec, Provider, TokenBatch, capabilities
from rlcore.spi.arrays import Int32Array
from rlcore.spi.weights import VALUE_HEAD_WEIGHT
from rlcore.testing.fakes.generator import OWN_SCALE
from rlcore.testing.fakes.policy import NAMES, NUM_POSITIONS, ORIGIN, POSITION, TRANSITION, VALUES_PATH, make_weights
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.tokenizer import VOCABULARY_SIZE, FakeTokenizer
from rlcore.testing.fakes.trainer import FakeTrainerConfig
from rlcore_conformance.algorithm import AlgorithmConformance
from rlcore_conformance.algorithms.loss_values import EvaluateLoss, Figures, HeldConstants, LossValue
from rlcore_conformance.environment import EnvironmentConformance
from rlcore_conformance.generator import GeneratorConformance
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.probe import ProbeConfig, expected_probe, expected_value_probe
from rlcore_conformance.references.reference import (
    LEFT_OUT,
    Float64Array,
    Reference,
    ReferenceValues,
    left_out,
    log_softmax,
    reference_logprobs,
    reference_values,
)
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainer import TrainerConformance

NUM_TOKENS = 9
"""Few, since the trainer's gradients are taken token by token."""


class TableReference:
    """The tables' logits, looked up token by token."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def load(self, weights: Values) -> "TablePolicy":
        """A policy with exactly these tables."""
        assert set(weights) == set(NAMES), f"found tensors {sorted(weights)}; expected {sorted(NAMES)}"
        return TablePolicy({name: value.astype(np.float64) for name, value in weights.items()})


class TablePolicy:
    """Gradients by central differences of the loss, parameter by parameter."""

    def __init__(self, weights: Mapping[str, Float64Array]) -> None:
        self._weights = weights

    def logits(self, tokens: Int32Array) -> Float64Array:
        """float64 [L, V]"""
        rows = [
            self._weights[TRANSITION][token]
            + self._weights[ORIGIN][tokens[0]]
            + self._weights[POSITION][(index + 1) % NUM_POSITIONS]
            for index, token in enumerate(tokens.tolist())
        ]
        return np.array(rows)

    def gradient_norm(self, batch: TokenBatch, loss: LossSpec, temperature: float) -> float:
        """Return the norm; an entropy that is a metric is held constant, as are the log-probabilities before the step."""
        current, fixed = reference_logprobs(self, batch, temperature)
        previous = loss.previous_of(batch.token_columns, current)
        step, square = 1e-5, 0.0
        for table in self._weights.values():
            for index in np.ndindex(table.shape):
                kept = table[index]
                values = []
                for moved in (kept + step, kept - step):
                    table[index] = moved
                    values.append(self._loss(batch, loss, temperature, fixed, previous))
                table[index] = kept
                square += ((values[0] - values[1]) / (2 * step)) ** 2
        return float(np.sqrt(square))

    def _loss(
        self,
        batch: TokenBatch,
        loss: LossSpec,
        temperature: float,
        fixed_entropy: Float64Array,
        previous: Float64Array | None,
    ) -> float:
        assert isinstance(loss.config, ProbeConfig)
        starts = np.repeat(batch.offsets[:-1], batch.lengths)
        later = np.flatnonzero(np.arange(batch.num_tokens) > starts)
        values = self._weights[TRANSITION][batch.tokens[later - 1]] + self._weights[ORIGIN][batch.tokens[starts[later]]]
        values = (values + self._weights[POSITION][(later - starts[later]) % NUM_POSITIONS]) / temperature
        if batch.sampling_mask is not None:
            values = np.where(left_out(batch.sampling_mask, values.shape[1])[later], LEFT_OUT, values)
        table = log_softmax(values)
        logprobs, entropy = np.zeros(batch.num_tokens), np.zeros(batch.num_tokens)
        logprobs[later] = table[np.arange(len(later)), batch.tokens[later]]
        entropy[later] = -(np.exp(table) * table).sum(axis=1)
        chosen = {"none": None, "metric": fixed_entropy, "loss": entropy}[loss.entropy]
        return expected_probe(batch, logprobs, chosen, loss.config, previous)[0]


class TableValues:
    """Values looked up token by token; gradients by central differences of the loss, parameter by parameter."""

    def __init__(self, weights: Values) -> None:
        assert set(weights) == {*NAMES, VALUE_HEAD_WEIGHT}
        self._weights = {name: value.astype(np.float64) for name, value in weights.items()}

    def values(self, tokens: Int32Array) -> Float64Array:
        """float64 [L]"""
        tables = {name: value for name, value in self._weights.items() if name in NAMES}
        return np.asarray(TablePolicy(tables).logits(tokens) @ self._weights[VALUE_HEAD_WEIGHT][0])

    def gradient_norm(self, batch: TokenBatch, loss: LossSpec) -> float:
        """Return the norm."""
        step, square = 1e-5, 0.0
        for table in self._weights.values():
            for index in np.ndindex(table.shape):
                kept, losses = table[index], []
                for moved in (kept + step, kept - step):
                    table[index] = moved
                    losses.append(expected_value_probe(batch, reference_values(self, batch))[0])
                table[index] = kept
                square += ((losses[0] - losses[1]) / (2 * step)) ** 2
        return float(np.sqrt(square))


class FakeTrainerConformance(TrainerConformance):
    """The kit for the fake trainer."""

    @pytest.fixture
    def provider(self) -> Provider:
        """The fake trainer."""
        return FAKE_TRAINER

    @pytest.fixture
    def config(self, provider: Provider) -> Any:
        """Few tokens, and initial weights far from uniform."""
        return FakeTrainerConfig(vocab_size=NUM_TOKENS, initial_scale=1.0)

    @pytest.fixture
    def model(self) -> ModelSpec:
        """A fake needs no directory."""
        return ModelSpec(path="fake")

    @pytest.fixture
    def loss_path(self) -> str:
        """The probe loss in numpy."""
        return "numpy_losses:probe_loss"

    @pytest.fixture
    def value_loss_path(self) -> str:
        """The probe loss of values in numpy."""
        return "numpy_losses:value_probe_loss"

    @pytest.fixture
    def reference(self, model: ModelSpec) -> Reference:
        """The naive reference that results are compared with."""
        return TableReference(NUM_TOKENS)

    @pytest.fixture
    def value_model(self, provider: Provider) -> ModelSpec:
        """What stands for a directory with a head of values."""
        require(provider, capabilities.VALUE_HEAD)
        return ModelSpec(path=VALUES_PATH)

    @pytest.fixture
    def value_reference(self, value_model: ModelSpec) -> Callable[[Values], ReferenceValues]:
        """The naive reference that values are compared with."""
        return TableValues


class FakeGeneratorConformance(GeneratorConformance):
    """The kit for the fake generator."""

    @pytest.fixture
    def provider(self) -> Provider:
        """The fake generator."""
        return FAKE_GENERATOR

    @pytest.fixture
    def model(self) -> ModelSpec:
        """A fake needs no directory."""
        return ModelSpec(path="fake")

    @pytest.fixture
    def weights(self) -> tuple[Mapping[str, NDArray[Any]], Mapping[str, NDArray[Any]]]:
        """Two sets of weights, of two seeds."""
        return make_weights(VOCABULARY_SIZE, 0, OWN_SCALE), make_weights(VOCABULARY_SIZE, 1, OWN_SCALE)

    @pytest.fixture
    def reference(self, model: ModelSpec) -> Reference:
        """The naive one, of as many tokens as the tokenizer has."""
        return TableReference(VOCABULARY_SIZE)

    @pytest.fixture
    def lora(self) -> LoraSpec:
        """Adapters of two of the three tables."""
        return LoraSpec(rank=3, alpha=6.0, targets=("transition", "position"))

    @pytest.fixture
    def adapter_scale(self) -> float:
        """Adapters that change the tables as much as their own values are."""
        return 0.5

    @pytest.fixture
    def decode(self) -> Any:
        """The fakes' tokenizer."""
        return FakeTokenizer().decode


def fake_loss(
    spec: LossSpec,
    batch: TokenBatch,
    counts: GlobalCounts,
    figures: Figures,
    constants: HeldConstants | None = None,
) -> LossValue:
    """A loss of the fakes on one microbatch: numpy arrays in, its own derivatives out."""
    fields: dict[str, Any] = {
        "entropy": None,
        "loss_mask": batch.loss_mask,
        "offsets": batch.offsets,
        "token_columns": {name: batch.token_columns[name] for name in spec.token_columns},
        "sequence_columns": batch.sequence_columns,
        "counts": counts,
        **{name: figure.astype(np.float64) for name, figure in figures.items()},
    }
    output: Any = resolve_name(spec.path)(LossInputs(**fields), spec.config)
    gradients = {"values": output.loss.value_grads} if "values" in figures else {"logprobs": output.loss.logprob_grads}
    if spec.entropy == "loss":
        gradients["entropy"] = output.loss.entropy_grads
    return LossValue(value=output.loss.value, gradients=gradients, sums=output.sums, maxima=output.maxima)


class FakeAlgorithmConformance(AlgorithmConformance):
    """The kit for the fake algorithm."""

    @pytest.fixture
    def provider(self) -> Provider:
        """The fake algorithm."""
        return FAKE_ALGORITHM

    @pytest.fixture
    def evaluate_loss(self) -> EvaluateLoss:
        """In numpy."""
        return fake_loss


class FakeEnvironmentConformance(EnvironmentConformance):
    """The kit for the fake environment."""

    @pytest.fixture
    def provider(self) -> Provider:
        """The fake environment."""
        return FAKE_ENVIRONMENT

"""Checks of the capability `adapters_together`: pieces of several adapters in one call are those of each by turns."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    ForwardBackwardRequest,
    ForwardBackwardResult,
    ForwardBackwardTogetherRequest,
    LoraSpec,
    NonFiniteError,
    OptimStepRequest,
    Provider,
    UseAdapterRequest,
    capabilities,
)
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.reference import Reference
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainers.batches import Arrangement, arrange, make_batch, spoiled
from rlcore_conformance.trainers.pieces import piece_of
from rlcore_conformance.trainers.step_outcome import assert_close, assert_same_names, assert_same_weights, distance
from rlcore_conformance.trainers.trainer_adapters import SEEDS, begin
from rlcore_conformance.trainers.trainer_fixtures import OpenTrainer, TrainerFixtures, TrainerUnderTest

Pieces = Mapping[str, ForwardBackwardRequest]
NUM_STEPS = 2
NUM_PIECES = 2
ARRANGED: Mapping[str, Arrangement] = {"one": "uneven", "two": "together"}
"""The microbatches of each adapter's pieces: three and one."""


class TrainerAdaptersTogether(TrainerFixtures):
    """The contract of `forward_backward_together`."""

    @pytest.fixture
    def max_tokens(self) -> int | None:
        """Most tokens of a pass."""
        return None

    @pytest.fixture
    def together_trainer(
        self, provider: Provider, open_trainer: OpenTrainer, lora: LoraSpec, max_tokens: int | None
    ) -> Iterator[TrainerUnderTest]:
        """A fresh trainer of adapters that drop some of their inputs."""
        require(provider, capabilities.ADAPTERS_TOGETHER)
        with open_trainer(lora=evolve(lora, dropout=0.25), max_microbatch_tokens=max_tokens) as trainer:
            yield trainer

    @pytest.mark.parametrize("max_tokens", [20, None])
    def test_adapters_together_train_as_by_turns(self, together_trainer: TrainerUnderTest, reference: Reference) -> None:
        """Two steps of two pieces: figures, log-probabilities, norms of gradients and weights, in passes of few and of many
        tokens; the adapter in use stays in use."""
        trainer, size = together_trainer, reference.vocab_size
        expected, norms, weights = train(trainer, size, together=False)
        begun = {name: weights_of(trainer, name, begin_anew=True) for name in SEEDS}
        found, own_norms, own_weights = train(trainer, size, together=True)
        for mine, theirs in zip(found, expected, strict=True):
            assert_same_pieces(trainer, mine, theirs)
        for name in SEEDS:
            for own, other in zip(own_norms[name], norms[name], strict=True):
                assert_close(f"grad_norm of {name}", own, other, trainer.gradient_tolerance)
            difference, update = distance(own_weights[name], weights[name]), distance(weights[name], begun[name])
            share = max(0.02, trainer.tolerance / 3)
            assert difference <= share * update, f"{name}: weights differ by {difference:.3g}, of an update of {update:.3g}"

    def test_failure_together_leaves_all_gradients(self, together_trainer: TrainerUnderTest, reference: Reference) -> None:
        """A loss that is not finite in the last adapter's piece: each step has the gradients of the pieces before."""
        trainer, size = together_trainer, reference.vocab_size
        norms = []
        for fails in (False, True):
            for name in SEEDS:
                begin(trainer, name)
            call(trainer, pieces_of(trainer, size, 0, 0))
            pieces = pieces_of(trainer, size, 0, 1)
            wrong = pieces["two"]
            wrong = evolve(wrong, microbatches=tuple(map(spoiled, wrong.microbatches)))
            if fails:
                with pytest.raises(NonFiniteError):
                    call(trainer, {**pieces, "two": wrong})
            norms.append([end_step(trainer, name, 0, 1) for name in SEEDS])
        for found, expected in zip(norms[1], norms[0], strict=True):
            assert_close("grad_norm behind a failure", found, expected, trainer.gradient_tolerance)


def train(
    trainer: TrainerUnderTest, vocab_size: int, *, together: bool
) -> tuple[list[dict[str, ForwardBackwardResult]], dict[str, list[float]], dict[str, Values]]:
    """Begin the adapters and train them, together or by turns. Return the results of their pieces, the norms of
    their gradients and their weights."""
    results, norms = [], {name: list[float]() for name in SEEDS}
    for name in SEEDS:
        begin(trainer, name)
    for version in range(NUM_STEPS):
        for number in range(NUM_PIECES):
            pieces = pieces_of(trainer, vocab_size, version, number)
            if together:
                trainer.handle.use_adapter(UseAdapterRequest(name="one"))
                before = trainer.weights(version)
                results.append(call(trainer, pieces))
                assert_same_weights(trainer.weights(version), before)
                continue
            own = {}
            for name, piece in pieces.items():
                trainer.handle.use_adapter(UseAdapterRequest(name=name))
                own[name] = trainer.handle.forward_backward(piece)
            results.append(own)
        for name in SEEDS:
            norms[name].append(end_step(trainer, name, version, NUM_PIECES))
    return results, norms, {name: weights_of(trainer, name) for name in SEEDS}


def pieces_of(trainer: TrainerUnderTest, vocab_size: int, version: int, number: int) -> dict[str, ForwardBackwardRequest]:
    """A piece of each adapter: other tokens, microbatches, counts and temperatures."""
    pieces = {}
    for place, (name, arrangement) in enumerate(ARRANGED.items()):
        batch = make_batch(vocab_size, SEEDS[name] + 10 * version + number)
        batches = arrange(batch, arrangement)
        request = trainer.request(batches, version, temperature=1.0 + 0.25 * (number and place))
        wants = capabilities.STEP_LOGPROBS in trainer.provider.capabilities
        pieces[name] = evolve(piece_of(request, batches, number), logprobs=wants)
    return pieces


def call(trainer: TrainerUnderTest, pieces: Pieces) -> dict[str, ForwardBackwardResult]:
    """Add the pieces in one call."""
    return dict(trainer.handle.forward_backward_together(ForwardBackwardTogetherRequest(pieces=pieces)).pieces)


def end_step(trainer: TrainerUnderTest, name: str, version: int, pieces: int) -> float:
    """Apply the pieces of an adapter; the norm of their gradient."""
    trainer.handle.use_adapter(UseAdapterRequest(name=name))
    return trainer.handle.optim_step(OptimStepRequest(pieces=pieces, weight_version=version)).grad_norm


def weights_of(trainer: TrainerUnderTest, name: str, *, begin_anew: bool = False) -> Values:
    """The exported weights with an adapter in use, as it begins or as it is."""
    if begin_anew:
        begin(trainer, name)
        return trainer.weights()
    version = trainer.handle.use_adapter(UseAdapterRequest(name=name)).weight_version
    return trainer.weights(version)


def assert_same_pieces(
    trainer: TrainerUnderTest,
    found: Mapping[str, ForwardBackwardResult],
    expected: Mapping[str, ForwardBackwardResult],
) -> None:
    """The results of each adapter's piece are those by turns, but for rounding."""
    assert [*found] == [*expected], f"found the pieces of {[*found]}; expected {[*expected]}"
    for name, theirs in expected.items():
        mine = found[name]
        assert_close(f"loss of {name}", mine.loss, theirs.loss, trainer.tolerance)
        assert_same_names(f"metrics of {name}", mine.metrics, theirs.metrics)
        for metric, value in theirs.metrics.items():
            assert_close(f"{metric} of {name}", mine.metrics[metric], value, trainer.tolerance)
        for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=trainer.tolerance, err_msg=name)

"""Checks of the capability `many_adapters`: adapters that train by turns on one model, each as it does alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ContractError, LoraSpec, OptimStepRequest, Provider, TokenBatch, UseAdapterRequest, capabilities
from rlcore_conformance.references.fixtures import require
from rlcore_conformance.references.reference import Reference
from rlcore_conformance.references.tensors import Values
from rlcore_conformance.trainers.batches import make_batch
from rlcore_conformance.trainers.pieces import piece_of
from rlcore_conformance.trainers.step_outcome import assert_same_weights
from rlcore_conformance.trainers.trainer_fixtures import OpenTrainer, TrainerFixtures, TrainerUnderTest
from rlcore_conformance.trainers.trainer_lora import saved_products

SEEDS = {"one": 11, "two": 12}
NUM_STEPS = 2
Call: TypeAlias = Callable[[TrainerUnderTest], object]


class TrainerAdapters(TrainerFixtures):
    """The contract of `use_adapter`."""

    @pytest.fixture
    def adapters_trainer(self, provider: Provider, open_trainer: OpenTrainer, lora: LoraSpec) -> Iterator[TrainerUnderTest]:
        """A fresh trainer of adapters that drop some of their inputs."""
        require(provider, capabilities.MANY_ADAPTERS)
        with open_trainer(lora=evolve(lora, dropout=0.25), needs_reference=True) as trainer:
            yield trainer

    @pytest.mark.parametrize("order", range(3))
    def test_adapters_by_turns_train_as_alone(
        self, adapters_trainer: TrainerUnderTest, reference: Reference, order: int
    ) -> None:
        """Whatever the order of their calls: pieces, steps and log-probabilities of one change no bit of another."""
        trainer, alone = adapters_trainer, dict[str, Values]()
        for name in SEEDS:
            begin(trainer, name)
            for call in calls_of(name, reference.vocab_size):
                call(trainer)
            alone[name] = trainer.weights(NUM_STEPS)
        assert any((value != alone["two"][name]).any() for name, value in alone["one"].items()), "both adapters are the same"
        for name in SEEDS:
            begin(trainer, name)
        for name, call in interleaved({name: calls_of(name, reference.vocab_size) for name in SEEDS}, order):
            trainer.handle.use_adapter(UseAdapterRequest(name=name))
            call(trainer)
        for name, expected in alone.items():
            trainer.handle.use_adapter(UseAdapterRequest(name=name))
            assert_same_weights(trainer.weights(NUM_STEPS), expected)

    def test_first_adapter_is_that_of_the_context(self, adapters_trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """It comes back as it was, and the reference is the model without adapters throughout."""
        trainer = adapters_trainer
        (before,) = trainer.logprobs((batch,), model="reference")
        trainer.step((batch,))
        weights = trainer.weights(1)
        begin(trainer, "one")
        trainer.step((batch,))
        np.testing.assert_array_equal(trainer.logprobs((batch,), 1, model="reference")[0], before)
        trainer.handle.use_adapter(UseAdapterRequest(name=""))
        assert_same_weights(trainer.weights(1), weights)

    def test_saved_adapter_is_loaded_into_another(
        self, adapters_trainer: TrainerUnderTest, batch: TokenBatch, tmp_path: Path
    ) -> None:
        """The adapter that is loaded into has its weights, and the one that was saved stays as it is."""
        trainer = adapters_trainer
        begin(trainer, "one")
        trainer.step((batch,))
        saved = trainer.weights(1)
        trainer.save(tmp_path)
        begin(trainer, "two")
        assert trainer.load(tmp_path) == 1
        assert_same_weights(trainer.weights(1), saved)
        trainer.step((batch,), 1)
        trainer.handle.use_adapter(UseAdapterRequest(name="one"))
        assert_same_weights(trainer.weights(1), saved)

    def test_smaller_rank_is_kept(
        self, adapters_trainer: TrainerUnderTest, lora: LoraSpec, reference: Reference, tmp_path: Path
    ) -> None:
        """Through steps, a save and a load: the PEFT directory has it, and scaled by alpha / rank it is what training added."""
        trainer, smaller = adapters_trainer, evolve(lora, rank=lora.rank - 1)
        initial = trainer.weights()
        trainer.handle.use_adapter(UseAdapterRequest(name="one", seed=SEEDS["one"], rank=smaller.rank))
        for version in range(NUM_STEPS):
            trainer.step((make_batch(reference.vocab_size, seed=version),), version)
        resume, peft = tmp_path / "resume", tmp_path / "peft"
        resume.mkdir()
        peft.mkdir()
        trainer.save(resume)
        begin(trainer, "two")
        trainer.load(resume)
        weights, products = trainer.weights(NUM_STEPS), saved_products(trainer, smaller, peft)
        assert any(product.any() for product in products.values()), "the adapter did not move"
        for name, before in initial.items():
            np.testing.assert_allclose(weights[name] - before, products.get(name, 0.0), rtol=0, atol=1e-5, err_msg=name)

    def test_adapters_that_were_never_begun_are_refused(self, adapters_trainer: TrainerUnderTest) -> None:
        """So are forgotten ones; the trainer goes on with the one in use."""
        trainer = adapters_trainer
        begin(trainer, "one")
        begin(trainer, "two")
        trainer.handle.use_adapter(UseAdapterRequest(name="two", drops=("one",)))
        for name, drops in (("three", ()), ("one", ()), ("", ("x",))):
            with pytest.raises(ContractError):
                trainer.handle.use_adapter(UseAdapterRequest(name=name, drops=drops))
        assert trainer.handle.weight_version == 0
        trainer.weights()


def begin(trainer: TrainerUnderTest, name: str) -> None:
    """Begin one of SEEDS anew."""
    trainer.handle.use_adapter(UseAdapterRequest(name=name, seed=SEEDS[name]))


def calls_of(name: str, vocab_size: int) -> Sequence[Call]:
    """The calls of an adapter's training: steps of two pieces, and log-probabilities between."""
    calls = list[Call]()
    for version in range(NUM_STEPS):
        for piece in range(2):
            batch = make_batch(vocab_size, seed=SEEDS[name] + 10 * version + piece)
            calls += [partial(add_piece, batch, version, piece), partial(read_logprobs, batch, version)]
        calls.append(partial(end_step, version))
    return calls


def add_piece(batch: TokenBatch, version: int, piece: int, trainer: TrainerUnderTest) -> None:
    """Add a piece of the adapter in use."""
    trainer.handle.forward_backward(piece_of(trainer.request((batch,), version), (batch,), piece))


def read_logprobs(batch: TokenBatch, version: int, trainer: TrainerUnderTest) -> None:
    """Compute log-probabilities under the adapter in use."""
    trainer.logprobs((batch,), version)


def end_step(version: int, trainer: TrainerUnderTest) -> None:
    """Apply two pieces of the adapter in use."""
    trainer.handle.optim_step(OptimStepRequest(pieces=2, weight_version=version))


def interleaved(calls: Mapping[str, Sequence[Call]], seed: int) -> Iterator[tuple[str, Call]]:
    """Yield the calls of all adapters, each one's in its order, in an order that the seed decides."""
    names = [name for name, own in calls.items() for _ in own]
    remaining = {name: iter(own) for name, own in calls.items()}
    for name in np.random.default_rng(seed).permutation(names).tolist():
        yield name, next(remaining[name])

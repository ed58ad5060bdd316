"""The fakes pass the conformance kit, whichever of their capabilities they declare."""

import pytest
from attrs import evolve

from rlcore.spi import capabilities
from rlcore.testing.fakes.conformance import FakeGeneratorConformance, FakeTrainerConformance
from rlcore.testing.fakes.providers import FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainerConfig


class TestFakeTrainer(FakeTrainerConformance):
    """Adam."""


class TestFakeTrainerSgd(FakeTrainerConformance):
    """SGD, with clipping."""

    @pytest.fixture
    def config(self):
        return FakeTrainerConfig(vocabulary_size=9, initial_scale=1.0, optimizer="sgd", learning_rate=0.05, max_grad_norm=0.5)


class TestFakeTrainerThatDeclaresNothing(FakeTrainerConformance):
    """What is not declared is not asked for."""

    @pytest.fixture
    def provider(self):
        return evolve(FAKE_TRAINER, capabilities=())


class TestFakeGenerator(FakeGeneratorConformance):
    """All capabilities."""


class TestFakeGeneratorThatDeclaresLittle(FakeGeneratorConformance):
    """What is not declared is not asked for."""

    @pytest.fixture
    def provider(self):
        return evolve(FAKE_GENERATOR, capabilities={capabilities.REFIT_IN_PROCESS})

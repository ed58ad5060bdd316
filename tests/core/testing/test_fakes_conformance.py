"""The fakes pass the conformance kit, whichever of their capabilities they declare."""

import pytest
from attrs import evolve

from rlcore.spi import OptimizerSpec, capabilities
from rlcore.testing.fakes.conformance import FakeGeneratorConformance, FakeTrainerConformance
from rlcore.testing.fakes.providers import FAKE_GENERATOR, FAKE_RANKED_TRAINER, FAKE_TRAINER


class TestFakeTrainer(FakeTrainerConformance):
    """The kit's optimizer."""


class TestFakeTrainerOptimizer(FakeTrainerConformance):
    """With every option of the optimizer in effect."""

    @pytest.fixture
    def optimizer(self):
        return OptimizerSpec(learning_rate=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, max_grad_norm=0.05)


class TestFakeTrainerOfSeveralRanks(FakeTrainerConformance):
    """Two processes."""

    @pytest.fixture
    def provider(self):
        return FAKE_RANKED_TRAINER


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

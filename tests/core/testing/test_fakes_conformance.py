"""The fakes pass the conformance kit, nothing skipped but what they don't declare."""

import pytest

from rlcore.testing.fakes.conformance import FakeGeneratorConformance, FakeTrainerConformance
from rlcore.testing.fakes.trainer import FakeTrainerConfig


class TestFakeTrainer(FakeTrainerConformance):
    """Adam."""


class TestFakeTrainerSgd(FakeTrainerConformance):
    """SGD, with clipping."""

    @pytest.fixture
    def config(self):
        return FakeTrainerConfig(vocabulary_size=9, initial_scale=1.0, optimizer="sgd", learning_rate=0.05, max_grad_norm=0.5)


class TestFakeGenerator(FakeGeneratorConformance):
    """All capabilities."""

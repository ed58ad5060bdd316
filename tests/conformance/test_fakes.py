"""The fakes pass the conformance kit, whichever of their capabilities they declare."""

import sys
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.spi import OptimizerSpec
from rlcore.testing.fakes.algorithm import FakeAlgorithmConfig
from rlcore.testing.fakes.environment import FakeEnvironmentConfig
from rlcore.testing.fakes.providers import FAKE_GENERATOR, FAKE_TRAINER

sys.path.insert(0, str(Path(__file__).parent))  # ranks import right_trainers too

from fake_kits import (
    FakeAlgorithmConformance,
    FakeEnvironmentConformance,
    FakeGeneratorConformance,
    FakeTrainerConformance,
)
from ranked_trainer import FAKE_RANKED_TRAINER
from right_trainers import ExportsOneTensorTwice, FiguresRoundedOnRankOne


class TestFakeTrainer(FakeTrainerConformance):
    """The kit's optimizer."""


@pytest.mark.wide  # the kit's checks of the optimizer vary these options one by one
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
        return evolve(FAKE_GENERATOR, capabilities={"refit.in_process"})


class TestFakeAlgorithm(FakeAlgorithmConformance):
    """Of every source, with every term of its losses."""

    @pytest.fixture(
        params=[
            FakeAlgorithmConfig(),
            FakeAlgorithmConfig(previous_logprobs=True, kl_coefficient=0.1, entropy_coefficient=0.1),
            FakeAlgorithmConfig(generation_ratio=True),
            FakeAlgorithmConfig(critic=True),
            FakeAlgorithmConfig(source="demonstrations"),
            FakeAlgorithmConfig(source="demonstrations", head="value"),
            FakeAlgorithmConfig(source="preferences"),
        ],
        ids=["plain", "all terms", "stale", "critic", "demonstrations", "values", "preferences"],
    )
    def config(self, request):
        return request.param


class TestFakeEnvironment(FakeEnvironmentConformance):
    """Of one turn and of two."""

    @pytest.fixture(params=[1, 2])
    def config(self, request):
        return FakeEnvironmentConfig(num_turns=request.param)


def held_to_its_check(trainer, provider):
    changed = evolve(provider, backend=f"{trainer.__module__}:{trainer.__name__}")
    others = (name for name in dir(FakeTrainerConformance) if name.startswith("test_") and name != trainer.check)
    fields = {"provider": pytest.fixture(lambda self: changed), **dict.fromkeys(others)}
    return type(trainer.__name__, (FakeTrainerConformance,), fields)


TestFiguresRoundedOnRankOne = held_to_its_check(FiguresRoundedOnRankOne, FAKE_RANKED_TRAINER)
TestExportsOneTensorTwice = held_to_its_check(ExportsOneTensorTwice, FAKE_TRAINER)

"""rlcore-mlx passes the conformance kit."""

import pytest

from rlcore_conformance import GeneratorConformance, TrainerConformance
from rlcore_mlx.provider import GENERATOR, TRAINER

pytestmark = pytest.mark.skipif(TRAINER.unavailable() is not None, reason="needs MLX")


class TestMlxTrainer(TrainerConformance):
    @pytest.fixture
    def provider(self):
        return TRAINER


class TestMlxGenerator(GeneratorConformance):
    @pytest.fixture
    def provider(self):
        return GENERATOR

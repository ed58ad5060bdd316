"""Every algorithm that is installed passes the kit, with its default options and with those that add terms to its loss."""

from importlib.metadata import entry_points

import pytest

from rlcore_conformance import AlgorithmConformance
from rlcore_distill.config import DistillConfig
from rlcore_grpo.config import GrpoConfig
from rlcore_ppo.config import PpoConfig

OWN_LOOP = "own_loop"
"""The algorithm of sessions, whose program makes its own batches."""
PROVIDERS = {entry.name: entry.load() for entry in entry_points(group="rlcore.algorithms") if entry.name != OWN_LOOP}
PRESETS = {entry.name for entry in entry_points(group="rlcore.algorithms") if entry.module == "rlcore_grpo.presets"}
OPTIONS = {
    "grpo with a KL and an entropy term": ("grpo", GrpoConfig(kl_coefficient=0.1, entropy_coefficient=0.01)),
    "ppo with a KL in its rewards": ("ppo", PpoConfig(kl_coefficient=0.1, entropy_coefficient=0.01)),
    "distill of a teacher's texts": ("distill", DistillConfig(samples="teacher")),
}


def test_there_are_algorithms_of_every_source():
    assert {"grpo", "ppo", "sft", "dpo", "distill", "bradley_terry", "gspo", "cispo"} <= set(PROVIDERS)


class TestAlgorithms(AlgorithmConformance):
    """By their defaults."""

    @pytest.fixture(params=sorted(PROVIDERS.keys() - PRESETS))
    def provider(self, request):
        return PROVIDERS[request.param]


@pytest.mark.wide
class TestPresets(AlgorithmConformance):
    """GRPO with other defaults: tests/recipes/test_presets.py trains each, and TestAlgorithms runs its code."""

    @pytest.fixture(params=sorted(PRESETS))
    def provider(self, request):
        return PROVIDERS[request.param]


class TestAlgorithmsWithOptions(AlgorithmConformance):
    """With terms that the defaults leave out."""

    @pytest.fixture(params=sorted(OPTIONS))
    def chosen(self, request):
        return OPTIONS[request.param]

    @pytest.fixture
    def provider(self, chosen):
        return PROVIDERS[chosen[0]]

    @pytest.fixture
    def config(self, chosen):
        return chosen[1]

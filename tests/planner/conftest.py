"""Fakes that offer plans, and a recipe for them."""

import json
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.testing.fakes import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore_ray.provider import RAY

from ..core.run.conftest import prepared as prepared  # type: ignore[import-not-found]
from ..core.run.conftest import run as run  # type: ignore[import-not-found]
from . import planners

RECIPE = """
model.path = "model"
algorithm.name = "{algorithm}"
environment.name = "{environment}"
rollout.samples_per_prompt = 4
rollout.max_response_tokens = 1000
training.prompts_per_step = 32
"""


@pytest.fixture
def registry() -> Registry:
    """The fakes, whose trainer and generator have plans."""
    trainer = evolve(FAKE_TRAINER, plan=f"{planners.__name__}:plan_trainer")
    generator = evolve(FAKE_GENERATOR, plan=f"{planners.__name__}:plan_generator")
    return Registry.from_providers(
        {
            "trainer": [trainer],
            "generator": [generator],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
            "execution": [RAY],
        }
    )


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe's file, beside a model that is a config.json alone."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"hidden_size": 8}))
    file = tmp_path / "recipe.toml"
    file.write_text(RECIPE.format(algorithm=FAKE_ALGORITHM.name, environment=FAKE_ENVIRONMENT.name))
    return file

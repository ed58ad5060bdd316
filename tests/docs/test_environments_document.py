"""The recipes of docs/environments.md and of the package's README pass the check of the environment."""

import tomllib

import pytest
from markdown_blocks import ROOT, blocks

from rlcore.schema.structure import structure
from rlcore_reasoning_gym.checks import check_reasoning_gym
from rlcore_reasoning_gym.config import ReasoningGymConfig


@pytest.mark.parametrize("path", ["docs/environments.md", "plugins/reasoning_gym_environment/README.md"])
def test_the_recipe_passes_the_check(path):
    (recipe,) = [block for block in blocks(ROOT / path) if block.language == "toml" and "reasoning_gym" in block.text]
    config, problems = structure(tomllib.loads(recipe.text)["environment"]["reasoning_gym"], ReasoningGymConfig, "environment")
    assert problems == []
    assert check_reasoning_gym(None, config) == []

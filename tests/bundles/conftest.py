"""Runs of a small model that learns sums, and bundles of their steps."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.storage import read_bundle
from rlcore_torchkit.testing.models import make_model

SCORE = "def score(completion, answer):\n    return completion.strip() == answer\n"
Recipe = dict[str, Any]


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows and a reward function."""
    folder = tmp_path_factory.mktemp("sums")
    make_model(folder / "model", alphabet="0123456789+=", max_length=32)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(SCORE)
    return folder


@pytest.fixture(scope="session")
def recipe_of(sums: Path) -> Callable[..., Recipe]:
    """Makes a recipe with some sections of its own."""

    def make(directory: Path, name: str = "run", **sections: Any) -> Recipe:
        recipe: Recipe = {
            "model": {"path": str(sums / "model")},
            "algorithm": {"name": "grpo"},
            "environment": {"name": "function", "function": {"path": f"{sums / 'score.py'}:score"}},
            "run": {"directory": str(directory), "name": name, "num_steps": 3},
            "data": {"train": {"source": "jsonl", "path": str(sums / "rows.jsonl")}},
            "rollout": {"samples_per_prompt": 4, "max_prompt_tokens": 4, "max_response_tokens": 2},
            "training": {"prompts_per_step": 16, "minibatches_per_step": 2},
            "optimizer": {"learning_rate": 5e-3},
            "checkpoint": {"every_n_steps": 1, "keep": 9},
            "sinks": {"names": []},
            "logging": {"bundles_every_n_steps": 2, "bundle_weights": "state"},
        }
        for section, values in sections.items():
            recipe[section] = {**recipe.get(section, {}), **values}
        return recipe

    return make


@pytest.fixture(scope="session")
def finished(recipe_of: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has written its second step, with the trainer's state, to a bundle."""
    run = rlcore.train(recipe_of(tmp_path_factory.mktemp("runs")), progress="silent")
    return run.path


@pytest.fixture(scope="session")
def recorded(finished: Path) -> Bundle:
    """The bundle of the second step of that run."""
    return read_bundle(finished / "bundles" / "step-000002")


@pytest.fixture(scope="session")
def receipted(recipe_of: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with a receipt of each of its three steps, and a bundle of the second."""
    options = {"every_n_steps": 1, "max_waiting": 9}
    return rlcore.train(recipe_of(tmp_path_factory.mktemp("receipted"), receipts=options), progress="silent").path

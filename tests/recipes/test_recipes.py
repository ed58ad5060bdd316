"""Every recipe of the repository is accepted as it stands, without a network."""

import asyncio
import json
import os
import socket
import tomllib
from pathlib import Path

import pytest

from rlcore.run.plan.prepare import prepare
from rlcore_text.rows.datasets import load_rows
from rlcore_torchkit.testing.models import make_model

RECIPES = Path(__file__).parents[2] / "recipes"
PROBLEMS = (
    {"question": "Anna has 3 apples and buys 4. How many?", "answer": "She has 3 + 4 = <<3+4=7>>7 apples.\n#### 7"},
    {"question": "A box holds 1,000 pens. How many do 2 boxes hold?", "answer": "2 x 1,000 = 2,000\n#### 2,000"},
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Any attempt to connect to another machine is an error."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    connect = socket.socket.connect

    def refuse(self, address):
        if self.family != socket.AF_UNIX:
            raise AssertionError(f"a connection to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), max_length=2048, head_dim=64)


def whole_recipes():
    """Every recipe but those that others only extend, which name no algorithm."""
    return [path for path in sorted(RECIPES.glob("*.toml")) if "algorithm" in tomllib.loads(path.read_text())]


def test_every_other_recipe_is_extended():
    parts = {path.name for path in RECIPES.glob("*.toml")} - {path.name for path in whole_recipes()}
    assert parts <= {tomllib.loads(path.read_text()).get("extends") for path in whole_recipes()}


@pytest.mark.parametrize("path", whole_recipes(), ids=lambda path: path.name)
def test_recipes_are_accepted(path, model):
    harbor = os.environ.get("RLCORE_HARBOR_PYTHON")
    if path.name == "harbor.toml" and harbor is None:
        pytest.skip("RLCORE_HARBOR_PYTHON names no Python with harbor 0.26")
    python = [f"environment.harbor.python={harbor}"] if path.name == "harbor.toml" else []
    teacher = [f"reference.path={model}"] if "reference" in tomllib.loads(path.read_text()) else []
    scorer = [f"environment.reward_model.path={model}"] if "[environment.reward_model]" in path.read_text() else []
    prepared = prepare(path, [f"model.path={model}", *teacher, *scorer, *python])
    assert set(prepared.chosen) >= {"algorithm", "trainer"}


def test_gsm8k_names_a_model_of_the_hub():
    """Nothing is downloaded to check it."""
    prepared = prepare(RECIPES / "gsm8k-grpo.toml")
    assert prepared.model.path.count("/") == 1
    assert {role: entry.name for role, entry in prepared.chosen.items()} == {
        "algorithm": "grpo",
        "environment": "math",
        "execution": "in_process",
        "generator": "transformers",
        "trainer": "fsdp2",
    }
    assert prepared.recipe.evaluates


def test_gsm8k_reads_its_files(tmp_path, model):
    """The question reaches the model as a user's message, and the answer the environment."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    overrides = [f"model.path={model}", f"data.train.path={file}", f"data.evaluation.path={file}"]
    prepared = prepare(RECIPES / "gsm8k-grpo.toml", overrides)
    for split, config in (("train", prepared.recipe.data.train), ("evaluation", prepared.recipe.data.evaluation)):
        rows = load_rows(config, split, prepared.environment)
        assert len(rows) == len(PROBLEMS)
        for row, problem in zip(rows, PROBLEMS, strict=True):
            reset = asyncio.run(prepared.environment.reset(row, seed=0))
            (message,) = reset.observation.messages
            assert message["role"] == "user"
            assert message["content"].startswith(problem["question"])
            assert reset.state == problem["answer"]

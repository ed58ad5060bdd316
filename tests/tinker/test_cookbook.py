"""Recipes of tinker-cookbook, unmodified, against a server: with rows of this file in place of the Hub's."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tinker_server import KEY, Address, serving

from rlcore_torchkit.testing.models import make_model

MODEL = "meta-llama/Llama-3.1-8B"
"""A name for which the cookbook knows a renderer without special tokens. In the working directory it is a small model's."""
ROWS = """
import runpy, sys
import datasets
from datasets import Dataset, DatasetDict

def rows(number):
    talk = [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": f"{number}!"}]
    return {
        "messages": talk,
        "question": f"What is {number}+1?",
        "answer": f"#### {number + 1}",
        "chosen": f"\\n\\nHuman: Say {number}\\n\\nAssistant: {number}!",
        "rejected": f"\\n\\nHuman: Say {number}\\n\\nAssistant: no",
    }

def load_dataset(path, *args, split=None, **kwargs):
    made = Dataset.from_list([rows(number) for number in range(12)])
    return made if split else DatasetDict(train=made, test=made)

datasets.load_dataset = load_dataset
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__")
"""
RECIPES = {
    "sl_loop": ["max_length=200", "save_every=1", "batch_size=4", "learning_rate=1e-2"],
    "rl_loop": ["batch_size=2", "group_size=4", "max_tokens=8"],
    "preference.dpo.train": ["renderer_name=role_colon", "batch_size=4", "max_length=200", "learning_rate=1e-3"],
}
pytestmark = [
    pytest.mark.wide(keep=["sl_loop"]),
    pytest.mark.skipif(find_spec("tinker_cookbook") is None, reason="needs the cookbook, whose pins exclude this transformers"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the model and the script."""
    made: Path = tmp_path_factory.mktemp("cookbook")
    make_model(made / MODEL, max_length=2048)
    (made / "recipe.py").write_text(ROWS)
    return made


@pytest.fixture(scope="module")
def cookbook_server(folder: Path) -> Iterator[Address]:
    """A server of the model by the cookbook's name."""
    lengths = {"max_prompt_tokens": 1500, "max_response_tokens": 500}
    with serving(folder / "served", folder / MODEL, lora={"rank": 32}, name=MODEL, rollout=lengths) as address:
        yield address


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_to_its_end(cookbook_server: Address, folder: Path, recipe: str) -> None:
    log = folder / f"log-{recipe}"
    arguments = [f"base_url={cookbook_server.url}", f"model_name={MODEL}", f"log_path={log}", "max_steps=2", *RECIPES[recipe]]
    command = [sys.executable, "-W", "ignore", "recipe.py", f"tinker_cookbook.recipes.{recipe}", *arguments]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert len((log / "metrics.jsonl").read_text().splitlines()) >= 2
    assert "tinker://" in (log / "checkpoints.jsonl").read_text()

"""Recipes of tinker-cookbook, unmodified, against a server: with rows of this file in place of the Hub's."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from taught_model import make_taught_model
from tinker_server import KEY, Address, serving

MODEL = "meta-llama/Llama-3.1-8B"
"""A name for which the cookbook knows a renderer without special tokens. In the working directory it is a small model's."""
CALLS = [f'<tool_call>\n{{"name": "read_page", "arguments": {{"page": {number}}}}}\n</tool_call>' for number in range(1, 5)]
ANSWERS = [f"Answer: {number}" for number in (1, 2)]
REPLIES = {
    "<|im_start|>assistant\n": [*CALLS, *ANSWERS],
    **{one: ["<|im_end|>"] for one in (*CALLS, *ANSWERS)},
    ":": ["\\boxed{1}", "\\boxed{2}"],
}
"""The model's answer to a turn of a chat with tools, or of plain text."""
ROWS = """
import random, runpy, sys
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
    if path == "Salesforce/wikitext":
        words = random.Random(0).choices("the house until river when castle after game".split(), k=20_000)
        return Dataset.from_list([{"text": " ".join(words[first : first + 50])} for first in range(0, len(words), 50)])
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
NUMERICS = "rl_numerics_check.train"
PAGES = ["task.num_pages_min=2", "task.num_pages_max=2", "task.page_chars=60", "task.reward_tolerance=1.0"]
MOST_KL = 2e-4
"""The mean log-probability of the sampler less the trainer's that this recipe calls healthy for dense models."""
pytestmark = [
    pytest.mark.skipif(find_spec("tinker_cookbook") is None, reason="needs the cookbook, whose pins exclude this transformers"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the model and the script."""
    made: Path = tmp_path_factory.mktemp("cookbook")
    make_taught_model(made / MODEL, REPLIES)
    (made / "recipe.py").write_text(ROWS)
    return made


@pytest.fixture(scope="module")
def cookbook_server(folder: Path) -> Iterator[Address]:
    """A server of the model by the cookbook's name."""
    lengths = {"max_prompt_tokens": 3500, "max_response_tokens": 500}
    with serving(folder / "served", folder / MODEL, lora={"rank": 32}, name=MODEL, rollout=lengths) as address:
        yield address


@pytest.mark.wide(keep=["sl_loop"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_to_its_end(cookbook_server: Address, folder: Path, recipe: str) -> None:
    metrics, checkpoints = ran(cookbook_server, folder, recipe, ["max_steps=2", *RECIPES[recipe]])
    assert len(metrics) >= 2
    assert "tinker://" in checkpoints


@pytest.mark.wide
def test_numerics_check_of_turns_with_tools_passes(cookbook_server: Address, folder: Path) -> None:
    """Its own bound holds in every step, after updates too, and episodes have several turns that call the tool."""
    options = ["renderer_name=qwen3_instruct", *PAGES, "group_size=8", "groups_per_batch=4", "max_tokens=8", "max_steps=3"]
    metrics, _ = ran(cookbook_server, folder, NUMERICS, [*options, "learning_rate=1e-3", "lora_rank=16"])
    assert len(metrics) == 3
    for step in metrics:
        assert abs(step["optim/kl_sample_train_v1"]) < MOST_KL, step
        assert step["optim/kl_sample_train_v2"] < MOST_KL, step
        assert step["env/all/turns_per_episode"] > 1.3, step
        assert step["env/all/pages_read"] > 0.2, step


def ran(server: Address, folder: Path, recipe: str, options: Sequence[str]) -> tuple[list[dict[str, float]], str]:
    """Run a recipe to its end; return its metrics by steps, and the text on its checkpoints."""
    log = folder / f"log-{recipe}"
    arguments = [f"base_url={server.url}", f"model_name={MODEL}", f"log_path={log}", *options]
    command = [sys.executable, "-W", "ignore", "recipe.py", f"tinker_cookbook.recipes.{recipe}", *arguments]
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    metrics = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return metrics, (log / "checkpoints.jsonl").read_text()

"""The cookbook's RL loop, unmodified, learns as `rlcore train` does from the same prompts, rewards and settings."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from taught_model import make_taught_model
from tinker_server import KEY, serving

import rlcore

MODEL = "meta-llama/Llama-3.1-8B"
"""A name for which the cookbook takes a renderer without special tokens."""
REPLIES = {":": [f"\\boxed{{{number}}}" for number in range(10)]}
"""The model's answer behind "Assistant:"."""
ANSWER = 7
NUM_PROMPTS, GROUP, RANK, LEARNING_RATE = 4, 8, 8, 1e-2
LOOPS = """
import json, sys
import datasets
from datasets import Dataset, DatasetDict

settings = json.loads(sys.argv[1])
rows = [{"question": f"What is {number}?", "answer": f"#### {settings.pop('answer')}"} for number in [0]] * settings.pop("rows")
datasets.load_dataset = lambda *args, **kwargs: DatasetDict(train=Dataset.from_list(rows))

from tinker_cookbook.recipes import rl_loop
from tinker_cookbook.renderers.role_colon import RoleColonRenderer

build, prompts = RoleColonRenderer.build_generation_prompt, []

def recording(self, *args, **kwargs):
    prompt = build(self, *args, **kwargs)
    prompts.append({"prompt": self.tokenizer.decode(prompt.to_ints()), "tokens": prompt.to_ints()})
    return prompt

RoleColonRenderer.build_generation_prompt = recording
for number, url in enumerate(settings.pop("urls")):
    rl_loop.main(rl_loop.Config(base_url=url, log_path=f"curves/{number}", save_every=0, max_tokens=1, **settings))
json.dump(prompts[: len(rows)], open("prompts.json", "w"))
"""
SCORE = """
def score(completion, answer):
    return float("\\\\boxed{" + answer + "}" in completion)
"""
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(find_spec("tinker_cookbook") is None, reason="needs the cookbook, whose pins exclude this transformers"),
]


def curves_of_cookbook(folder: Path, seeds: Sequence[int], num_steps: int) -> np.ndarray:
    """Mean rewards [seeds, steps] of rl_loop against a server for each seed; writes prompts.json."""
    rollout = {"max_prompt_tokens": 400, "max_response_tokens": 1}
    (folder / "loops.py").write_text(LOOPS)
    with ExitStack() as stack:
        urls = []
        for seed in seeds:
            options = {"lora": {"rank": 32}, "rollout": rollout, "run": {"seed": seed, "device": "cpu"}, "name": MODEL}
            urls.append(stack.enter_context(serving(folder / f"served-{seed}", folder / MODEL, **options)).url)
        settings = {"urls": urls, "rows": num_steps * NUM_PROMPTS, "answer": ANSWER, "model_name": MODEL, "lora_rank": RANK}
        settings |= {"batch_size": NUM_PROMPTS, "group_size": GROUP, "learning_rate": LEARNING_RATE}
        command = [sys.executable, "-W", "ignore", "loops.py", json.dumps(settings)]
        environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    return np.array([read(folder / "curves" / str(number), "reward/total") for number in range(len(seeds))])


def curves_of_rlcore(folder: Path, seeds: Sequence[int], num_steps: int) -> np.ndarray:
    """Mean rewards [seeds, steps] of `rlcore train` with the prompts of prompts.json."""
    (folder / "rewards.py").write_text(SCORE)
    prompts = json.loads((folder / "prompts.json").read_text())
    rows = [json.dumps({"prompt": one["prompt"], "answer": str(ANSWER)}) for one in prompts]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    curves = []
    for seed in seeds:
        rlcore.train(recipe_of(folder, seed, num_steps))
        curves.append(read(folder / "runs" / f"seed-{seed}", "reward_mean"))
    return np.array(curves)


def recipe_of(folder: Path, seed: int, num_steps: int) -> dict[str, Any]:
    """The recipe that has the settings of rl_loop."""
    optimizer = {"learning_rate": LEARNING_RATE, "betas": [0.9, 0.95], "max_grad_norm": 0.0}
    return {
        "model": {"path": str(folder / MODEL), "dtype": "float32"},
        "trainer": {"name": "fsdp2"},
        "generator": {"name": "transformers"},
        "lora": {"rank": RANK},
        "algorithm": {"name": "dr_grpo"},
        "environment": {"name": "function", "function": {"path": str(folder / "rewards.py:score")}},
        "data": {"train": {"source": "jsonl", "path": str(folder / "rows.jsonl"), "shuffle": False}},
        "rollout": {"samples_per_prompt": GROUP, "max_prompt_tokens": 400, "max_response_tokens": 1},
        "training": {"prompts_per_step": NUM_PROMPTS},
        "optimizer": optimizer,
        "run": {
            "directory": str(folder / "runs"),
            "name": f"seed-{seed}",
            "seed": seed,
            "num_steps": num_steps,
            "device": "cpu",
        },
    }


def read(directory: Path, name: str) -> list[float]:
    """The values of a metric, by steps."""
    return [json.loads(line)[name] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def p_value(one: np.ndarray, other: np.ndarray) -> float:
    """The p-value of the exact permutation test of curves [seeds, steps].

    The statistic is the sum over steps of the squared difference of
    the two means."""
    curves, size = np.concatenate([one, other]), len(one)

    def statistic(chosen: Sequence[int]) -> float:
        rest = [number for number in range(len(curves)) if number not in chosen]
        return float(((curves[list(chosen)].mean(0) - curves[rest].mean(0)) ** 2).sum())

    found = statistic(range(size))
    return float(np.mean([statistic(chosen) >= found - 1e-12 for chosen in combinations(range(len(curves)), size)]))


def test_cookbook_learns_as_rlcore_train(tmp_path: Path) -> None:
    """The permutation test of four seeds each finds no difference of the learning curves."""
    make_taught_model(tmp_path / MODEL, REPLIES)
    seeds, num_steps = range(4), 12
    cookbook = curves_of_cookbook(tmp_path, seeds, num_steps)
    own = curves_of_rlcore(tmp_path, seeds, num_steps)
    tokens = [one["tokens"] for one in json.loads((tmp_path / "prompts.json").read_text())]
    assert {len(one) for one in tokens} == {len(tokens[0])}
    for curves in (cookbook, own):
        assert curves.shape == (len(seeds), num_steps)
        assert curves[:, -3:].mean() > curves[:, :3].mean() + 0.1, "nothing was learned"
    assert p_value(cookbook, own) > 0.05, f"{cookbook.mean(0).round(2)} and {own.mean(0).round(2)}"

"""Runs of models that no family describes, on the embedded defaults: what was sampled is what the trainer computes."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "fsdp2_backend"))

from decoder_families import TRAINED, make_family

from .system_support import STEPS_ALONE, Workplace, write_jsonl  # type: ignore[import-not-found]

REWARD = """
def low(completion):
    return sum(letter < "a" for letter in completion) / 4
"""
RECIPE = """
extends = "grpo.toml"
[environment]
name = "function"
[environment.function]
path = "rewards.py:low"
[data.train]
source = "jsonl"
path = "prompts.jsonl"
[data.evaluation]
source = "jsonl"
path = "prompts.jsonl"
"""


@pytest.mark.wide(keep=["deepseek_v3"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_trainer_and_generator_say_the_same_after_each_update(workplace: Workplace, tmp_path: Path, name: str) -> None:
    """Soft caps, sinks in windows, latent attention with experts; each step's samples come from refitted weights."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "any.toml").write_text(RECIPE)
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{number} is"} for number in range(12)])
    model = make_family(tmp_path / "model", name, TRAINED[name])
    run = workplace.train("any.toml", f"model.path={model}", *STEPS_ALONE, "training.minibatches_per_step=2", "run.num_steps=3")
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["updates"] for step in steps] == [2, 2, 2]
    assert all(step["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4) for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)

"""The demo's two recipes in short, with trainer and generator of MLX: supervised fine-tuning, and GRPO from what it exports."""

import json
from pathlib import Path

import pytest

import rlcore

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = (
    "trainer.name=mlx",
    "generator.name=mlx",
    "environment.arithmetic.min_operand=0",
    "environment.arithmetic.max_operand=9",
    "environment.arithmetic.num_train=40",
    "environment.arithmetic.num_evaluation=8",
)


def metrics_of(run_directory):
    lines = map(json.loads, (run_directory / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "loss" in line]


def test_the_demos_recipes_learn_and_agree(model_directory, tmp_path):
    common = (*SHORT, f"run.directory={tmp_path}")
    problems = rlcore.rows(RECIPES / "demo-grpo.toml", *common, f"model.path={model_directory()}")
    data = tmp_path / "solutions.jsonl"
    rows = [{"prompt": row["prompt"], "completion": str(row["answer"])} for row in problems]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options = ("run.num_steps=12", "training.prompts_per_step=16", "evaluation.every_n_steps=12", "schedule.warmup_steps=0")
    sft = rlcore.train(
        RECIPES / "demo-sft.toml", *common, *options, f"model.path={model_directory()}", f"data.train.path={data}"
    )
    losses = [step["loss"] for step in metrics_of(tmp_path / "sft")]
    assert losses[-1] < 0.75 * losses[0]
    options = ("run.num_steps=2", "training.prompts_per_step=16", "environment.arithmetic.partial_credit=0.5")
    rlcore.train(RECIPES / "demo-grpo.toml", *common, *options, f"model.path={sft.model}")
    steps = metrics_of(tmp_path / "grpo")
    assert [step["step"] for step in steps] == [1, 2]
    assert [step["token_mult_prob_error"] for step in steps] == pytest.approx([1.0, 1.0], abs=1e-4)

"""GRPO with images, end to end: what vLLM samples of drawings is as probable to the trainer, and rewards teach."""

import importlib.util
from pathlib import Path

import pytest

import rlcore
from rlcore_torchkit.testing.image_models import make_image_model

from .system_support import read_metrics  # type: ignore[import-not-found]

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = (
    "environment.drawn_shapes.grid=1",
    "environment.drawn_shapes.cell_pixels=8",
    "training.prompts_per_step=16",
)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM reads images with torchvision")
def test_rewards_teach_what_demonstrations_have_left(tmp_path: Path) -> None:
    """One shape, and one of two questions: who does not look at the image is right half of the time."""
    make_image_model(tmp_path / "model", "qwen3_vl")
    directory = f"run.directory={tmp_path}"
    rlcore.train(
        RECIPES / "shapes-sft.toml",
        f"model.path={tmp_path / 'model'}",
        directory,
        "run.num_steps=10",
        "optimizer.learning_rate=5e-3",
        *SMALL,
    )
    taught = f"model.path={tmp_path / 'shapes-sft' / 'model'}"
    options = ("run.num_steps=24", "evaluation.every_n_steps=0", "optimizer.learning_rate=1e-3")
    rlcore.train(RECIPES / "shapes-grpo.toml", taught, directory, *options, *SMALL)
    _, *steps = read_metrics(tmp_path / "shapes-grpo")
    rewards = [step["reward_mean"] for step in steps]
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 4 * 0.1
    assert all(abs(step["ratio_max"] - 1) < 1e-3 and abs(step["token_mult_prob_error"] - 1) < 1e-4 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)

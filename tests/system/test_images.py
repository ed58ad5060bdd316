"""Images end to end: what vLLM samples of drawings is as probable to the trainer, rewards teach, and so do public rows."""

import importlib.util
import io
from pathlib import Path

import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

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


IMAGE, ANSWERS = {"type": "image", "text": None}, ("rb", "br", "rr", "bb")
RECIPE = """
[run]
num_steps = 30
[trainer]
name = "fsdp2"
[algorithm]
name = "sft"
[data.train]
source = "parquet"
[rollout]
max_prompt_tokens = 64
max_response_tokens = 8
[training]
prompts_per_step = 4
[optimizer]
learning_rate = 1e-2
"""


def text(value):
    return {"type": "text", "text": value}


FORMS = {
    "verl": lambda answer: {
        "messages": [{"role": "user", "content": "<image><image>\nWhich?"}, {"role": "assistant", "content": answer}],
        "data_source": "colours",
        "extra_info": {"split": "train", "index": 0},
    },
    "trl-messages": lambda answer: {
        "messages": [
            {"role": "user", "content": [IMAGE, text("and"), IMAGE, text("Which?")]},
            {"role": "assistant", "content": [text(answer)]},
        ]
    },
    "trl-completion": lambda answer: {
        "prompt": [{"role": "user", "content": "Which?"}],
        "completion": [{"role": "assistant", "content": answer}],
    },
}
"""Rows with two images as verl's and TRL's documentation write them, beside the column `images`."""


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_verl_and_trl_teach_the_order_of_their_images(form, tmp_path):
    """The answers name the colours of two images in turn: prompts differ in their images alone."""
    make_image_model(tmp_path / "model", "qwen3_vl")
    files = {}
    for colour in ("red", "blue"):
        buffer = io.BytesIO()
        Image.new("RGB", (16, 8), colour).save(buffer, format="PNG")
        files[colour[0]] = {"bytes": buffer.getvalue(), "path": None}
    rows = [{**FORMS[form](answer), "images": [files[colour] for colour in answer]} for answer in ANSWERS]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    options = (f"model.path={tmp_path / 'model'}", f"data.train.path={tmp_path / 'rows.parquet'}", f"run.directory={tmp_path}")
    rlcore.train(tmp_path / "recipe.toml", *options, "run.name=colours")
    _, *steps = read_metrics(tmp_path / "colours")
    assert steps[-1]["loss"] < 0.1

"""Drawings, their questions and their rewards; and that a small model learns to count what it sees."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rlcore
from rlcore.config.model import ModelConfig
from rlcore.spi import DataError, EnvironmentContext, FinishReason, Turn
from rlcore_model_files.images import decode_image
from rlcore_shapes.config import ShapesConfig
from rlcore_shapes.environment import ShapesEnvironment
from rlcore_text.tokenizers.tokenizer import load_tokenizer
from rlcore_torchkit.testing.image_models import make_image_model

sys.path.insert(0, str(Path(__file__).parents[1] / "fsdp2_backend"))

from image_support import ImageReference

RECIPE = Path(__file__).parents[2] / "recipes" / "shapes-sft.toml"
CONTEXT = EnvironmentContext(seed=0)


def environment(**options):
    return ShapesEnvironment(CONTEXT, ShapesConfig(**options))


def shapes_in(file, cells):
    """The kind of each cell's shape, by its corner and its middle: a circle leaves the background at its box's corners."""
    pixels = np.asarray(decode_image(file)).astype(int)
    side = len(pixels) // cells
    for top in range(0, len(pixels), side):
        for left in range(0, len(pixels), side):
            background, corner, middle = pixels[top, left], pixels[top + 1, left + 1], pixels[top + side // 2, left + side // 2]
            if (middle != background).any():
                yield "square" if (corner == middle).all() else "circle"


def turn(text):
    return Turn(text=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP)


def test_the_answer_is_what_the_drawing_shows():
    answers = set()
    for row in environment(grid=3, num_train=50).rows("train"):
        image, question = row["prompt"][0]["content"]
        kinds = list(shapes_in(image["image"], 3))
        assert kinds
        assert row["answer"] == row["completion"] == str(kinds.count(question["text"].removesuffix("s?")))
        answers.add(row["answer"])
    assert len(answers) > 4


def test_drawings_follow_from_their_number_and_held_out_ones_are_others():
    train, held_out = (environment().rows(split) for split in ("train", "evaluation"))
    assert (len(train), len(held_out)) == (5000, 200)
    assert train[7] == environment(num_train=10).rows("train")[7]
    assert train[7] != environment(drawing_seed=1).rows("train")[7]
    files = [row["prompt"][0]["content"][0]["image"] for rows in (train[:200], held_out) for row in rows]
    assert len(set(files)) == 400


def test_the_number_alone_is_rewarded():
    async def rewards(row, *answers):
        begun = await environment().reset(row, 0)
        return [(await environment().step(begun.state, turn(answer))).reward for answer in answers]

    row = environment().rows("train")[0]
    right = row["answer"]
    assert asyncio.run(rewards(row, right, f" {right}\n", f"{right}{right}1", "", "one")) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_row_without_an_answer_is_refused():
    with pytest.raises(DataError, match="'prompt'"):
        asyncio.run(environment().reset({"prompt": "how many?"}, 0))


def test_a_small_model_learns_what_it_sees(tmp_path):
    """One shape, and one of two questions: who does not look at the image is right half of the time."""
    make_image_model(tmp_path / "model", "qwen3_vl")
    shapes = {"grid": 1, "cell_pixels": 8}
    rlcore.train(
        RECIPE,
        f"model.path={tmp_path / 'model'}",
        f"run.directory={tmp_path}",
        "run.num_steps=60",
        "optimizer.learning_rate=5e-3",
        "training.prompts_per_step=16",
        *(f"environment.drawn_shapes.{key}={value}" for key, value in shapes.items()),
    )
    trained = tmp_path / "shapes-sft" / "model"
    tokenizer, model = load_tokenizer(ModelConfig(path=str(trained))), ImageReference(trained)
    num_right = 0
    for row in environment(**shapes, num_evaluation=50).rows("evaluation"):
        prompt = torch.tensor(tokenizer.encode(tokenizer.render_chat(row["prompt"])))
        with torch.no_grad():
            logits = model.logits(prompt, (row["prompt"][0]["content"][0]["image"],))
        num_right += tokenizer.decode([int(logits[-1].argmax())]) == row["answer"]
    assert num_right >= 45

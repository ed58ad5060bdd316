"""The recipe of an agent whose answers are held to a JSON Schema."""

import json
from pathlib import Path

import pytest

import rlcore
from rlcore_torchkit.testing.models import CHAT_TEMPLATE, make_model

RECIPES = Path(__file__).parents[2] / "recipes"


def test_every_whole_answer_is_json_and_its_tokens_are_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    model = make_model(tmp_path / "model", max_length=256)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    overrides = [f"model.path={model}", f"run.directory={tmp_path / 'runs'}", "run.num_steps=2", "training.prompts_per_step=4"]
    off = ["evaluation.at_start=false", "evaluation.at_end=false"]
    run = rlcore.train(RECIPES / "schema-agent.toml", *overrides, *off, progress="silent")
    steps = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        assert step["environment/json"] == 1.0
        assert step["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3)
    assert [step["updates"] for step in steps] == [1, 1]

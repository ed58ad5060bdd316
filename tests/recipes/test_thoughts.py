"""The recipe of an agent whose chat template drops earlier thoughts: its model, its rewards, and two steps of it."""

import asyncio
import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlcore
from rlcore_workers.functions import load_function

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("answers", "reward", "thoughts"),
    [(["</think>3", "12</think>7"], 1.0, 2.0), (["</think>4", "</think>77"], 0.375, 2.0), (["3", "7"], 0.0, 0.0)],
)
def test_an_answer_is_rewarded_for_its_form_and_its_digit(answers: list[str], reward: float, thoughts: float) -> None:
    asked: list[list[Any]] = []

    async def create(model: str, messages: list[Any]) -> Any:
        asked.append(list(messages))
        message = SimpleNamespace(content=answers[len(asked) - 1])
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])

    completions = SimpleNamespace(create=create)
    client = SimpleNamespace(model="policy", openai=SimpleNamespace(chat=SimpleNamespace(completions=completions)))
    repeat = load_function(f"{RECIPES}/thoughts/agent.py:repeat", "agent")
    assert asyncio.run(repeat({"prompt": "37"}, client)) == {"reward": reward, "thoughts": thoughts}
    assert [len(messages) for messages in asked] == [1, 3]
    assert asked[1][1] == {"role": "assistant", "content": answers[0]}


def test_each_turn_trains_in_a_segment_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_model.py", str(tmp_path / "model")])
    runpy.run_path(str(RECIPES / "thoughts" / "make_model.py"), run_name="__main__")
    overrides = [f"model.path={tmp_path / 'model'}", f"run.directory={tmp_path / 'runs'}", "run.num_steps=2"]
    run = rlcore.train(RECIPES / "thoughts.toml", *overrides, progress="silent")
    steps = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [step["environment/segments_per_episode"] for step in steps] == [2.0, 2.0]
    assert [step["updates"] for step in steps] == [1, 1]
    assert [step["token_mult_prob_error"] for step in steps] == pytest.approx([1.0, 1.0], abs=1e-3)

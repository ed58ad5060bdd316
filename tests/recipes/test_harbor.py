"""The recipe with tasks of Harbor: its verifiers, and a step of real trials."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import rlcore

RECIPES = Path(__file__).parents[2] / "recipes"
PYTHON = os.environ.get("RLCORE_HARBOR_PYTHON")
TASKS = {"write-three": "3", "write-seven": "7"}


@pytest.mark.parametrize("name", TASKS)
def test_a_verifier_rewards_form_and_digit(tmp_path: Path, name: str) -> None:
    task, digit = RECIPES / "harbor" / "tasks" / name, TASKS[name]
    assert (task / "instruction.md").read_text().strip() == digit
    for folder in ("app", "logs/verifier"):
        (tmp_path / folder).mkdir(parents=True)
    for answer, rewards in ((digit, (1, 1, 1)), ("0", (0.5, 1, 0)), (f"{digit}{digit}", (0, 0, 0)), ("", (0, 0, 0))):
        (tmp_path / "app" / "answer.txt").write_text(answer)
        subprocess.run([task / "tests" / "test.sh"], env={"ROOT": str(tmp_path), "PATH": os.environ["PATH"]}, check=True)
        found = json.loads((tmp_path / "logs" / "verifier" / "reward.json").read_text())
        assert found == dict(zip(("reward", "form", "digit"), rewards, strict=True))


@pytest.mark.skipif(PYTHON is None, reason="RLCORE_HARBOR_PYTHON names no Python with harbor 0.26")
def test_trials_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_model.py", str(tmp_path / "model")])
    runpy.run_path(str(RECIPES / "thoughts" / "make_model.py"), run_name="__main__")
    overrides = [
        f"model.path={tmp_path / 'model'}",
        f"run.directory={tmp_path / 'runs'}",
        f"environment.harbor.python={PYTHON}",
    ]
    smaller = ["run.num_steps=2", "rollout.samples_per_prompt=2"]
    run = rlcore.train(RECIPES / "harbor.toml", *overrides, *smaller, progress="silent")
    steps = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [step["environment/failed"] for step in steps] == [0.0, 0.0]
    assert [step["environment/segments_per_episode"] for step in steps] == [1.0, 1.0]
    assert all({"reward/form", "reward/digit", "environment/verifier_s"} <= set(step) for step in steps)

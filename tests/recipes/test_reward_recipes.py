"""Recipes of rows and rewards in the forms of other libraries, of rubrics and of rewarded parts: two steps of each."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore_torchkit.testing.models import make_model
from rlcore_workers.functions import load_function

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "model", alphabet="0123456789+=", max_length=32)


def trained(recipe: str, model: Path, folder: Path, *overrides: str) -> tuple[Path, list[dict[str, Any]]]:
    """The run directory, and the metrics of two steps."""
    given = (f"model.path={model}", f"run.directory={folder}", "run.num_steps=2", "training.prompts_per_step=16")
    off = ("evaluation.at_start=false", "evaluation.at_end=false")
    run = rlcore.train(RECIPES / recipe, *given, *off, *overrides, progress="silent")
    return run.path, [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def test_verls_rows_and_function_train(model: Path, tmp_path: Path) -> None:
    _, steps = trained("verl-sums.toml", model, tmp_path)
    assert len(steps) == 2
    for step in steps:
        assert 0.0 <= step["environment/right"] <= step["reward_mean"] <= 1.0


def test_trls_functions_are_weighed_and_its_callback_and_exports_are_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, steps = trained("trl-sums.toml", model, tmp_path, "checkpoint.every_n_steps=1", "run.num_steps=5")
    for step in steps:
        parts = step["reward/right"] + step["reward/right_length"]
        assert step["reward_mean"] == pytest.approx(parts, abs=1e-6)
    assert f"step 5: reward {steps[4]['reward_mean']:.3f}" in capsys.readouterr().out
    assert sorted(int(path.name.removeprefix("step-")) for path in (folder / "weights").iterdir()) == [2, 4, 5]


def test_right_digits_earn_their_parts(model: Path, tmp_path: Path) -> None:
    score = load_function(f"{RECIPES}/process/digits.py:score", "function")
    assert score("136", "136") == {"reward": 1 / 3, "success": True, "part_rewards": {1: 1 / 3, 2: 1 / 3}}
    assert score("146", "136") == {"reward": 0.0, "success": False, "part_rewards": {1: 1 / 3}}
    assert score("", "136") == {"reward": 0.0, "success": False, "part_rewards": {}}
    _, steps = trained("process-sums.toml", model, tmp_path)
    assert any(step["reward_mean"] > 0 for step in steps)
    assert [step["updates"] for step in steps] == [1, 1]


@pytest.fixture
def judge() -> Iterator[str]:
    """The address of the recipe's judge."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(RECIPES / "rubric" / "judge.py"), "--port", str(port)])
    try:
        end = time.monotonic() + 300
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def test_a_rubrics_criteria_are_components_of_the_reward(model: Path, tmp_path: Path, judge: str) -> None:
    _, steps = trained("rubric-sums.toml", model, tmp_path, f"environment.judge.base_url={judge}")
    for step in steps:
        parts = [step[f"reward/{name}"] for name in ("right", "length", "last_digit")]
        assert sum(parts) == pytest.approx(step["reward_mean"], abs=1e-6)
        assert 0.0 < step["reward_mean"] < 1.0

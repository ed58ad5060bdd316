"""The place where two runs part."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import rlcore
from rlcore.spi import CheckpointError
from rlcore_bundles.diff_command import diff_command
from rlcore_bundles.run_difference import run_difference

KEPT = {"bundles_every_n_steps": 0, "rollouts_every_n_steps": 1}


@pytest.fixture(scope="module")
def train(recipe_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains three steps with some sections of a recipe."""
    folder = tmp_path_factory.mktemp("runs")

    def train(name: str, **sections: Any) -> Path:
        return rlcore.train(recipe_of(folder, name, logging=KEPT, **sections), progress="silent").path

    return train


@pytest.fixture(scope="module")
def first(train: Callable[..., Path]) -> Path:
    """A run."""
    return train("first")


def test_equal_runs_do_not_part(train: Callable[..., Path], first: Path) -> None:
    second = train("again")
    found = run_difference(first, second)
    assert (found.step, found.sample, list(found.changes), found.num_steps) == (None, None, [], 3)
    ran = CliRunner().invoke(diff_command, [str(first), str(second)])
    assert ran.exit_code == 0
    assert ran.output == "All figures of 3 steps are equal to the last bit.\n"


def test_another_learning_rate_parts_behind_the_first_update(train: Callable[..., Path], first: Path) -> None:
    second = train("faster", optimizer={"learning_rate": 2e-2})
    found = run_difference(first, second)
    assert found.step == 1
    assert "learning_rate" in {figure.name for figure in found.figures}
    assert not {"reward_mean", "response_length_mean"} & {figure.name for figure in found.figures}
    assert found.sample is not None
    assert found.sample.step == 2
    assert any("optimizer.learning_rate" in change for change in found.changes)
    ran = CliRunner().invoke(diff_command, [str(first), str(second), "--json"])
    assert ran.exit_code == 1
    assert json.loads(ran.output)["step"] == 1


def test_another_seed_parts_at_the_first_token(train: Callable[..., Path], first: Path) -> None:
    second = train("other", run={"seed": 5})
    found = run_difference(first, second)
    assert found.step == 1
    assert found.sample is not None
    assert (found.sample.step, found.sample.sample) == (1, 0)
    assert found.sample.column in ("prompt", "tokens")
    ran = CliRunner().invoke(diff_command, [str(first), str(second)])
    assert "The runs part at step 1 of the 3 that both have" in ran.output
    assert "number 0 of step 1" in ran.output


def test_a_changed_reward_is_found_in_its_sample(train: Callable[..., Path], first: Path, sums: Path) -> None:
    score = sums / "once.py"
    score.write_text("def score(completion, answer, prompt):\n    return prompt == '1+2=' or completion.strip() == answer\n")
    second = train("scored", environment={"function": {"path": f"{score}:score"}})
    found = run_difference(first, second)
    assert found.sample is not None
    assert (found.sample.step, found.sample.column) == (1, "reward")
    assert found.figures[0].name.startswith("reward")


def test_what_is_no_run_is_refused(first: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        run_difference(first, tmp_path)
    assert str(tmp_path) in str(error.value)

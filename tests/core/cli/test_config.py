"""`rlcore config`: the recipe with every default, and its problems."""

import tomllib
from pathlib import Path


def test_config_prints_a_recipe_that_loads(invoke, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('model.path = "m"\nalgorithm.name = "x"\nenvironment.name = "y"')
    result = invoke("config", str(path), "run.seed=9")
    assert result.exit_code == 0, result.output
    tables = tomllib.loads(result.output)
    assert tables["run"]["seed"] == 9
    assert tables["rollout"]["samples_per_prompt"] == 8
    again = tmp_path / "again.toml"
    again.write_text(result.output)
    assert invoke("config", str(again)).output == result.output


def test_config_reports_everything_at_once(invoke, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[run]\nseed = "x"\nsed = 1\n')
    result = invoke("config", str(path))
    assert result.exit_code == 2
    assert "5 problem(s) in the recipe" in result.stderr
    assert all(key in result.stderr for key in ("run.seed", "run.sed", "model.path", "algorithm.name", "data.train.source"))


def test_config_takes_a_recipe(invoke) -> None:
    assert invoke("config").exit_code == 2

"""What `import rlcore` offers: its arguments; whole runs are in tests/system/test_python.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rlcore
from rlcore.spi import CheckpointError, ConfigError


def test_the_package_offers_its_interface_by_name() -> None:
    assert callable(rlcore.train)
    assert set(rlcore.__all__) >= {"train", "evaluate", "load", "rows", "Run"}
    with pytest.raises(AttributeError, match="'rlcore'.*'nothing'"):
        _ = rlcore.nothing


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"reward": 3}, "reward: found a int"),
        ({"reward": [len, "score"]}, "reward: found a str"),
        ({"reward": []}, "reward: found no function"),
        ({"dataset": {"train": [], "test": []}}, "dataset: found the key 'test'.*train, evaluation"),
        ({"reward": len, "environment": object()}, "reward and environment"),
        ({"environment": Path}, "environment: found the class Path; expected an object"),
    ],
)
def test_arguments_that_are_none_are_named(options: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        rlcore.train({"model": {"path": "none"}}, **options)


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (lambda: rlcore.train({}, progress="quiet"), "progress"),  # type: ignore[arg-type]
        (lambda: rlcore.evaluate({}, progress="quiet"), "progress"),  # type: ignore[arg-type]
        (lambda: rlcore.rows({}, split="test"), "split"),  # type: ignore[arg-type]
        (lambda: rlcore.train({}, {"run.num_steps": 3}), "overrides"),  # type: ignore[arg-type]
    ],
)
def test_words_that_are_none_are_named(call: Callable[[], Any], path: str) -> None:
    with pytest.raises(ConfigError) as raised:
        call()
    assert [problem.path for problem in raised.value.problems] == [path]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (None, "recipe: found a NoneType; expected a TOML file"),
        ({"run": {3: 1}, 5: {}}, r"recipe\.run: found the key 3 \(a int\)(.|\n)*recipe: found the key 5"),
        ({"data": {"train": [{4: 1}]}}, r"recipe\.data\.train\[0\]: found the key 4"),
    ],
)
def test_what_is_no_recipe_is_named(recipe: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rlcore.rows(recipe)


def test_a_recipe_is_a_file_or_what_one_would_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text('[algorithm]\nname = "none"\n')
    recipe = {"extends": "base.toml", "model": {"path": Path("model")}, "rollout": {"stop_strings": ("a", 7)}}
    with pytest.raises(ConfigError) as raised:
        rlcore.rows(recipe, "training.prompts=3")
    found = [problem.path for problem in raised.value.problems]
    assert {"rollout.stop_strings[1]", "training.prompts"} <= set(found)
    assert not {"model.path", "algorithm"} & set(found)
    with pytest.raises(ConfigError, match="no-such.toml"):
        rlcore.rows(str(tmp_path / "no-such.toml"))


def test_there_is_nothing_to_load_where_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run in"):
        rlcore.load(tmp_path)

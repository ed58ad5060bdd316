"""`rlcore.open`: which recipes it takes, what it leaves out of them, and what it refuses."""

import logging
from pathlib import Path

import pytest
import tomli_w

import rlcore
from rlcore.registry import run_parts
from rlcore.run.plan.prepare import prepare
from rlcore.spi import ConfigError, PluginError
from rlcore.testing.fakes.providers import FAKE_TRAINER

from .session_support import open_fakes, recipe_of, without

FULL = {
    "algorithm": {"name": "grpo", "grpo": {"kl_coefficient": 0.1}},
    "environment": {"name": "arithmetic"},
    "data": {"train": {"limit": 4}, "evaluation": {"limit": 2}},
    "evaluation": {"every_n_steps": 2},
    "async": {"max_staleness": 1},
    "checkpoint": {"every_n_steps": 1},
    "rollout": {"max_prompt_tokens": 8, "max_response_tokens": 4, "samples_per_prompt": 4, "dynamic_sampling": True},
}
LEFT_OUT = (
    "[algorithm], [environment], [data], [async], [evaluation], rollout.samples_per_prompt, rollout.dynamic_sampling, "
    "checkpoint.every_n_steps"
)


def test_full_recipe_is_taken_and_what_is_not_read_is_said_once(model, tmp_path, caplog):
    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(recipe_of(model, **FULL)))
    with caplog.at_level(logging.WARNING, "rlcore.session"), rlcore.open(file, "optimizer.learning_rate=0.5") as session:
        assert session.plan.recipe.optimizer.learning_rate == 0.5
        assert session.sample(["1+1="])
    texts = [record.getMessage() for record in caplog.records]
    assert texts.count(f"a session does not read {LEFT_OUT} of the recipe") == 1
    assert not [text for text in texts if text.startswith("algorithm")]


def test_short_recipe_says_nothing(model, caplog):
    with caplog.at_level(logging.WARNING, "rlcore.session"), rlcore.open(recipe_of(model)):
        assert not caplog.records


def test_wrong_recipe_gives_all_problems(model):
    with pytest.raises(ConfigError) as error:
        rlcore.open(recipe_of(model, optimiser={}), "rollout.temperature=-1")
    assert {problem.path for problem in error.value.problems} == {"optimiser", "rollout.temperature"}


def test_trainer_without_pieces_is_refused_before_anything_is_built(monkeypatch):
    monkeypatch.setattr("rlcore_session.session.execution", lambda *_: pytest.fail("it was built"))
    with pytest.raises(PluginError, match="(?s)trainer 'fake'.*split_step"):
        open_fakes(without(FAKE_TRAINER, "split_step"))


def test_run_with_the_algorithm_of_sessions_is_refused(model):
    recipe = recipe_of(model, algorithm={"name": "own_loop"}, environment={"name": "arithmetic"})
    with pytest.raises(ConfigError, match=r"rlcore\.open"):
        prepare(recipe)


def test_missing_package_names_the_line_that_installs_it(monkeypatch):
    monkeypatch.setattr(run_parts, "functions", lambda *_, **__: ())
    with pytest.raises(PluginError, match="^rlcore.open is not installed. Run: pip install rlcore-session$"):
        _ = rlcore.open


def test_disabled_package_is_named(monkeypatch):
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "rlcore-session")
    with pytest.raises(PluginError, match="rlcore.open is disabled"):
        _ = rlcore.open


def test_open_is_imported_by_name_alone():
    from rlcore import open as opening

    assert opening is rlcore.open
    assert "open" not in rlcore.__all__, "a star import would hide Python's own"


def test_recipe_that_is_none():
    with pytest.raises(ConfigError, match="recipe: found a int"):
        rlcore.open(3)


def test_missing_file():
    with pytest.raises(ConfigError, match="nowhere"):
        rlcore.open(Path("nowhere.toml"))

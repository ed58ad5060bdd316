"""Mistakes in `[receipts]`, and runs of which no receipt can be made."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.run.plan.prepare import prepare
from rlcore.spi import ConfigError
from rlcore_bundles.receipts import rules

BAD: dict[str, tuple[object, str, str]] = {
    "no table": (3, "receipts", "found 3 (an integer)"),
    "negative distance": ({"every_n_steps": -1}, "receipts.every_n_steps", "0 turns it off"),
    "a fraction": ({"every_n_steps": 0.5}, "receipts.every_n_steps", "expected an integer"),
    "no sequences": ({"num_sequences": 0}, "receipts.num_sequences", "at least 1"),
    "no tokens": ({"max_tokens": 0}, "receipts.max_tokens", "at least 1"),
    "no bound": ({"max_mean_difference": 0.0}, "receipts.max_mean_difference", "above 0"),
    "an infinite bound": ({"max_mean_difference": float("inf")}, "receipts.max_mean_difference", "above 0"),
    "another action": ({"on_excess": "stop"}, "receipts.on_excess", '"warn", "error"'),
    "no threads": ({"num_threads": 0}, "receipts.num_threads", "from 1 to 1024"),
    "fewer than none": ({"max_waiting": -1}, "receipts.max_waiting", "at least 0"),
    "a mistyped key": ({"every_n_step": 5}, "receipts.every_n_step", "every_n_steps"),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_named(mistake: str, recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    table, path, expected = BAD[mistake]
    with pytest.raises(ConfigError) as error:
        prepare(recipe_of(tmp_path) | {"receipts": table})
    assert {problem.path for problem in error.value.problems} == {path}
    assert expected in str(error.value)


def test_all_mistakes_are_named_at_once(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path) | {"receipts": {"num_threads": 0, "on_excess": "stop"}, "receipt": {}}
    recipe["training"]["prompts_per_step"] = 0
    with pytest.raises(ConfigError) as error:
        prepare(recipe)
    found = {problem.path: problem for problem in error.value.problems}
    assert found.keys() == {"receipts.num_threads", "receipts.on_excess", "receipt", "training.prompts_per_step"}
    assert found["receipt"].remedy == "Did you mean receipts?"


def test_without_the_package_the_message_says_what_to_install(
    recipe_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore.run.plan.sections.load_group", lambda *_: ())
    with pytest.raises(ConfigError) as error:
        prepare(recipe_of(tmp_path) | {"receipts": {}})
    assert "rlcore-bundles" in str(error.value)


def test_the_table_is_in_the_resolved_recipe_and_back(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    plan = prepare(recipe_of(tmp_path) | {"receipts": {"every_n_steps": 7}})
    assert "[receipts]\nevery_n_steps = 7\n" in plan.resolved
    (tmp_path / "recipe.toml").write_text(plan.resolved)
    again = prepare(tmp_path / "recipe.toml")
    assert again.recipe.tables == plan.recipe.tables
    assert prepare(recipe_of(tmp_path)).recipe.tables == {}


def test_room_that_is_not_there_is_refused(
    recipe_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "memory_bytes", lambda: 1)
    monkeypatch.setattr(rules.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError) as error:
        prepare(recipe_of(tmp_path) | {"receipts": {}})
    texts = [str(problem) for problem in error.value.problems]
    assert len(texts) == 2
    assert "available memory" in texts[0]
    assert "for 3 copies of the model" in texts[1]
    assert prepare(recipe_of(tmp_path) | {"receipts": {"every_n_steps": 0}}).recipe.tables


def test_a_model_that_reads_images_is_refused(recipe_of: Callable[..., Any], sums: Path, tmp_path: Path) -> None:
    shutil.copytree(sums / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"vision_config": {"a": 1}, "image_token_id": 3}))
    with pytest.raises(ConfigError) as error:
        prepare(recipe_of(tmp_path, generator={"name": "vllm"}, model={"path": str(tmp_path / "model")}, receipts={}))
    assert "which reads images" in str(error.value)


def test_the_parameters_of_a_model_are_counted_without_reading_them(sums: Path) -> None:
    from safetensors.numpy import load_file

    expected = sum(array.size for file in (sums / "model").glob("*.safetensors") for array in load_file(file).values())
    assert rules.num_parameters(sums / "model") == expected > 0


def test_what_a_receipt_leaves_out_is_said_once(recipe_of: Callable[..., Any], tmp_path: Path) -> None:
    sections = {"rollout": {"top_k": 3, "accept_truncation_bias": True}}
    notes = [note for note in prepare(recipe_of(tmp_path, **sections) | {"receipts": {}}).notes if "receipts" in note]
    assert notes == ["receipts: the generator's log-probabilities are of a truncated distribution, and are not compared"]

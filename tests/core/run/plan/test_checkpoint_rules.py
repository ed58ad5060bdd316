"""A program or an evaluator that is not there is found before the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.config.checkpoint_evaluation import CheckpointEvaluationConfig
from rlcore.run.plan import checkpoint_rules
from rlcore.run.plan.checkpoint_rules import program_problems, server_notes
from rlcore.spi import PluginError


@pytest.fixture(autouse=True)
def evaluator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some checkpoint evaluator is installed."""
    monkeypatch.setattr(checkpoint_rules, "only_function", lambda *_: object())


@pytest.fixture
def recipe(prepared: Callable[..., Any]) -> Any:
    return prepared().recipe


def problems(recipe: Any, **options: Any) -> list[str]:
    return [str(one) for one in program_problems(evolve(recipe, checkpoint_evaluation=CheckpointEvaluationConfig(**options)))]


def test_a_program_is_looked_for_where_it_would_be_started(recipe: Any, tmp_path: Path) -> None:
    assert list(program_problems(recipe)) == []
    assert problems(recipe, command=("sh", "-c", "true")) == []
    (missing,) = problems(recipe, command=("sh",), environment={"PATH": str(tmp_path)})
    assert f'checkpoint_evaluation.command[0]: found "sh", looked for in {tmp_path}' in missing
    file = tmp_path / "measure"
    file.write_text("#!/bin/sh\n")
    (not_executable,) = problems(recipe, command=(str(file),))
    assert "which is no program that can be run" in not_executable
    file.chmod(0o755)
    assert problems(recipe, command=("measure",), environment={"PATH": str(tmp_path)}) == []
    assert problems(recipe, command=("{run_directory}/measure",)) == []


def test_checkpoints_need_an_evaluator(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_rules, "only_function", lambda *_: None)
    (missing,) = problems(recipe, command=("sh",))
    assert "Run: pip install 'rlcore[serve]'" in missing


def test_a_server_that_plans_with_the_devices_of_the_run_is_noted(prepared: Callable[..., Any]) -> None:
    plan = prepared()
    entry = plan.chosen["generator"]
    planning = evolve(entry, provider=evolve(entry.provider, planned_options={"share"}))
    plan = evolve(plan, device="cuda", chosen={**plan.chosen, "generator": planning})

    def notes(*arguments: str, **options: Any) -> list[str]:
        made = CheckpointEvaluationConfig(command=("sh",), serve_arguments=arguments, **({"serve": True} | options))
        return [str(one) for one in server_notes(evolve(plan, recipe=evolve(plan.recipe, checkpoint_evaluation=made)))]

    (note,) = notes()
    assert note.startswith("checkpoint_evaluation.serve: the server runs beside training and generation on their GPUs")
    assert "generator.fake.share" in note
    assert notes("--generator", "fake") == notes("--generator=fake") == [note]
    assert notes("generator.fake.share=0.2") == notes("--generator", "other") == notes("run.device=cpu") == []
    assert notes(serve=False) == notes(environment={"CUDA_VISIBLE_DEVICES": "1"}) == []
    assert list(server_notes(plan)) == []


def test_a_trainer_that_exports_no_model_is_refused(prepared: Callable[..., Any]) -> None:
    with pytest.raises(PluginError, match=r"save_hf.*\[checkpoint_evaluation\]"):
        prepared("checkpoint_evaluation.command=['sh']")

"""What a recipe may say of a program that measures checkpoints, and whether the program is there, is found before the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.config.checkpoint_evaluation import CheckpointEvaluationConfig
from rlcore.spi import ConfigError, PluginError, capabilities
from rlcore.testing.fakes.trainer import FakeTrainer
from rlcore_serve.checkpoint_evaluation.rules import filled, program_problems, server_notes

COMMAND = "checkpoint_evaluation.command=['sh', '{model}']"
AT_URL = "checkpoint_evaluation.command=['sh', '--url', '{url}']"
SERVE = "checkpoint_evaluation.serve=true"


@pytest.fixture
def plan_of(prepared: Callable[..., Any], registry_with: Callable[..., Any]) -> Callable[..., Any]:
    """Prepare a recipe whose trainer exports models."""
    exporting = registry_with(trainer=FakeTrainer)
    entries = tuple(
        evolve(entry, provider=evolve(entry.provider, capabilities=entry.provider.capabilities | {capabilities.SAVE_HF}))
        if entry.role == "trainer" and entry.provider is not None
        else entry
        for entry in exporting.entries
    )
    return lambda *overrides: prepared(*overrides, registry=evolve(exporting, entries=entries))


@pytest.mark.parametrize(
    ("overrides", "path", "words"),
    [
        (("checkpoint_evaluation.wait=true",), "checkpoint_evaluation.command", "found nothing"),
        (("checkpoint_evaluation.command=[]",), "checkpoint_evaluation.command", "begin with a program"),
        (("checkpoint_evaluation.command=['sh', '{modle}']",), "checkpoint_evaluation.command[1]", "did you mean 'model'"),
        ((AT_URL,), "checkpoint_evaluation.command[2]", "Set checkpoint_evaluation.serve = true"),
        (
            (COMMAND, "checkpoint.every_n_steps=0", "checkpoint.at_end=false"),
            "checkpoint_evaluation",
            "checkpoints to measure",
        ),
        (
            (COMMAND, "checkpoint_evaluation.serve_arguments=['-x']"),
            "checkpoint_evaluation.serve_arguments",
            "nothing is served",
        ),
        *(
            ((COMMAND, f"checkpoint_evaluation.result_file='{file}'"), "checkpoint_evaluation.result_file", words)
            for file, words in (
                ("/tmp/r.json", "a path below {output}"),
                ("../*.json", "a path below {output}"),
                ("a**/r.json", "a path or a pattern"),
            )
        ),
        ((COMMAND, "checkpoint_evaluation.timeout_s=0"), "checkpoint_evaluation.timeout_s", "above 0"),
    ],
)
def test_what_is_wrong_is_said_at_its_key(
    plan_of: Callable[..., Any], overrides: tuple[str, ...], path: str, words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_of(*overrides)
    (problem,) = refused.value.problems
    assert problem.path == path
    assert words in str(problem)


@pytest.mark.parametrize(
    "overrides",
    [(COMMAND,), (AT_URL, SERVE, "checkpoint_evaluation.serve_arguments=['-x']"), (COMMAND, "checkpoint.every_n_steps=2")],
)
def test_sound_sections(plan_of: Callable[..., Any], overrides: tuple[str, ...]) -> None:
    assert plan_of(*overrides).recipe.checkpoint_evaluation is not None


def test_braces_that_are_no_placeholder_stay() -> None:
    command = ("m", '{"a": {step}, "b": {}}', "{model}/{step}", "{url}")
    assert filled(command, {"model": "/m", "step": 7}) == ("m", '{"a": 7, "b": {}}', "/m/7", "{url}")


def problems(**options: Any) -> list[str]:
    return [str(one) for one in program_problems(CheckpointEvaluationConfig(**options))]


def test_a_program_is_looked_for_where_it_would_be_started(tmp_path: Path) -> None:
    assert problems(command=("sh", "-c", "true")) == []
    (missing,) = problems(command=("sh",), environment={"PATH": str(tmp_path)})
    assert f'checkpoint_evaluation.command[0]: found "sh", looked for in {tmp_path}' in missing
    file = tmp_path / "measure"
    file.write_text("#!/bin/sh\n")
    (not_executable,) = problems(command=(str(file),))
    assert "which is no program that can be run" in not_executable
    file.chmod(0o755)
    assert problems(command=("measure",), environment={"PATH": str(tmp_path)}) == []
    assert problems(command=("{run_directory}/measure",)) == []


def test_a_server_that_plans_with_the_devices_of_the_run_is_noted(prepared: Callable[..., Any]) -> None:
    plan = prepared()
    entry = plan.chosen["generator"]
    planning = evolve(entry, provider=evolve(entry.provider, planned_options={"share"}))
    plan = evolve(plan, device="cuda", chosen={**plan.chosen, "generator": planning})

    def notes(*arguments: str, **options: Any) -> list[str]:
        made = CheckpointEvaluationConfig(command=("sh",), serve_arguments=arguments, **({"serve": True} | options))
        return [str(one) for one in server_notes(plan, made)]

    (note,) = notes()
    assert note.startswith("checkpoint_evaluation.serve: the server runs beside training and generation on their GPUs")
    assert "generator.fake.share" in note
    assert notes("--generator", "fake") == notes("--generator=fake") == [note]
    assert notes("generator.fake.share=0.2") == notes("--generator", "other") == notes("run.device=cpu") == []
    assert notes(serve=False) == notes(environment={"CUDA_VISIBLE_DEVICES": "1"}) == []


def test_a_trainer_that_exports_no_model_is_refused(prepared: Callable[..., Any]) -> None:
    with pytest.raises(PluginError, match=r"save_hf.*\[checkpoint_evaluation\]"):
        prepared("checkpoint_evaluation.command=['sh']")

"""What each command does with its arguments, and how fast the light ones start."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from attrs import evolve

import rlcore.run.plan.prepare
from rlcore import __version__
from rlcore.cli.check import _lines
from rlcore.cli.main import COMMANDS
from rlcore.config.recipe import ClusterConfig

from .conftest import prepared


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(invoke, command: str) -> None:
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.output


def test_the_group_lists_every_command(invoke) -> None:
    output = invoke("--help").output
    assert all(f"  {command} " in output for command in COMMANDS)


def test_train_passes_on_what_it_was_given(invoke, calls, tmp_path: Path) -> None:
    directory = tmp_path / 'a "b"'
    result = invoke("train", "r.toml", "run.seed=3", "--resume", "--directory", str(directory), "--name", "007", "a.b=x")
    assert result.exit_code == 0, result.output
    ((path, overrides),) = calls.prepared
    assert path == Path("r.toml")
    assert overrides[:2] == ["run.seed=3", "a.b=x"]
    assert tomllib.loads("\n".join(overrides[2:])) == {"run": {"directory": str(directory), "name": "007"}}
    assert calls.trained == [{"resume": True, "allow_changes": False}]


def test_train_starts_anew_by_default(invoke, calls) -> None:
    assert invoke("train", "r.toml").exit_code == 0
    assert calls.prepared == [(Path("r.toml"), [])]
    assert calls.trained == [{"resume": False, "allow_changes": False}]


def test_changes_are_allowed_where_a_run_is_resumed_alone(invoke, calls) -> None:
    assert invoke("train", "r.toml", "--resume", "--allow-changes").exit_code == 0
    assert calls.trained == [{"resume": True, "allow_changes": True}]
    refused = invoke("train", "r.toml", "--allow-changes")
    assert refused.exit_code == 2
    assert "--allow-changes is for --resume" in refused.stderr
    assert len(calls.trained) == 1


def test_check_says_what_would_run(invoke, calls) -> None:
    result = invoke("check", "r.toml", "run.seed=3")
    assert result.exit_code == 0
    assert calls.prepared == [(Path("r.toml"), ["run.seed=3"])]
    assert not calls.trained
    lines = {line.split()[0]: line for line in result.output.splitlines()}
    assert result.stdout.startswith("ok: r.toml")
    note = "note: trainer 'tra' (priority 50) is taken, as 'big' (priority 80) cannot be: needs a GPU\n"
    assert result.stderr == f"{note}note: odd\n"
    assert "  train data    3 rows of x.jsonl\n  first prompt\n    | <bos>1+1=\n    | \n" in result.stdout
    assert lines["trainer"].split(maxsplit=1)[1] == "tra 1.2 of acme-tra (auto, priority 50)"
    assert lines["generator"].split(maxsplit=1)[1] == "gen 1.2 of acme-gen (named)"
    assert lines["observer"].split(maxsplit=1)[1] == "obs 1.2 of acme-obs (named)"
    assert "some/model, not a directory here: to be fetched from the Hub" in lines["model"]
    assert "cluster" not in lines
    assert lines["refit"].split() == ["refit", "in_process"]
    assert "32 prompts x 8 samples" in lines["each"]
    assert lines["evaluation"].split(maxsplit=1)[1] == "at the start, at the end"


@pytest.mark.parametrize(
    ("cluster", "span", "expected"),
    [
        (ClusterConfig(gpus_per_node=4), 1, "1 x 4 GPU(s) train and generate in turn"),
        (ClusterConfig(nodes=2, gpus_per_node=4), 2, "2 x 4 GPU(s) train and generate in turn, each 2 with one generator"),
        (
            ClusterConfig(gpus_per_node=8, placement="separate", generator_gpus_per_node=3),
            1,
            "1 x 5 GPU(s) train, 1 x 3 generate",
        ),
    ],
)
def test_check_says_who_uses_which_devices(cluster: ClusterConfig, span: int, expected: str) -> None:
    found = prepared()
    found.recipe = evolve(found.recipe, cluster=cluster)
    found.device, found.span = "cuda", span
    assert dict(_lines(found))["cluster"] == expected
    del found.chosen["generator"]
    assert dict(_lines(found))["cluster"] == f"{expected.split(' train')[0]} train"


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


def test_config_reference_takes_no_recipe(invoke) -> None:
    assert invoke("config", "--reference").output.startswith("# Configuration")
    assert invoke("config", "r.toml", "--reference").exit_code == 2
    assert invoke("config").exit_code == 2


def test_eval_prints_figures(invoke, calls, tmp_path: Path) -> None:
    result = invoke("eval", "r.toml", "--checkpoint", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == ["evaluation/pass@1                0.6250", "evaluation/response_length_mean  7.5000"]
    assert calls.evaluated == [{"checkpoint": tmp_path}]


def test_eval_of_another_model_as_json(invoke, calls) -> None:
    result = invoke("eval", "r.toml", "run.seed=3", "--model", "12", "--json")
    assert json.loads(result.stdout) == {"evaluation/pass@1": 0.625, "evaluation/response_length_mean": 7.5}
    assert calls.prepared == [(Path("r.toml"), ["run.seed=3", 'model.path="12"'])]
    assert calls.evaluated == [{"checkpoint": None}]


def test_eval_of_a_checkpoint_and_a_model_is_refused(invoke, calls) -> None:
    result = invoke("eval", "r.toml", "--model", "a", "--checkpoint", "b")
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr
    assert not calls.prepared


def test_version_lists_plugins_and_libraries(invoke) -> None:
    found = json.loads(invoke("version", "--json").output)
    assert found["rlcore"] == __version__
    assert found["Python"] == ".".join(map(str, sys.version_info[:3]))
    assert "numpy" in found
    assert invoke("version").output.startswith("rlcore")


def test_the_version_alone(invoke) -> None:
    assert invoke("--version").output == f"rlcore {__version__}\n"


def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rlcore", "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == f"rlcore {__version__}\n"


HEAVY = ("torch", "transformers", "ray", "pyarrow", "matplotlib", "datasets")


@pytest.mark.parametrize("command", [["--help"], ["version"], ["plugins"]])
def test_light_commands_import_nothing_heavy(command: list[str]) -> None:
    code = (
        "import sys\nfrom rlcore.cli.main import cli\n"
        f"try: cli({command!r})\nexcept SystemExit as end: assert not end.code, end\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\nassert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


@pytest.mark.parametrize("command", ["check", "train", "eval"])
def test_a_gpu_that_is_not_there_is_said_before_anything_else(invoke, calls, monkeypatch, command: str) -> None:
    gpu = prepared()
    gpu.device = "cuda"
    monkeypatch.setattr(rlcore.run.plan.prepare, "prepare", lambda *_, **__: gpu)
    monkeypatch.setattr(rlcore.run.plan.prepare, "detect_device", lambda: "cpu")
    result = invoke(command, "r.toml")
    assert result.exit_code == 2
    assert 'run.device: found "cuda", and no GPU' in result.stderr
    assert calls.trained == calls.evaluated == []
    monkeypatch.setattr(rlcore.run.plan.prepare, "detect_device", lambda: "cuda")
    assert invoke(command, "r.toml").exit_code == 0

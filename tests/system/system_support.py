"""Recipes, the command line in this process, and distributions installed for a test."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from click.testing import CliRunner, Result

from rlcore.cli.main import cli

DIGITS = "0123456789+-*="
GRPO = """
[run]
num_steps = 4
[model]
path = "{model}"
[algorithm]
name = "grpo"
[environment]
name = "arithmetic"
[environment.arithmetic]
max_operand = 9
num_train = 60
num_evaluation = 8
partial_credit = 0.5
[data.evaluation]
[rollout]
samples_per_prompt = 4
max_prompt_tokens = 8
max_response_tokens = 4
[training]
prompts_per_step = 4
[optimizer]
learning_rate = 1e-2
[checkpoint]
every_n_steps = 2
[logging]
rollouts_every_n_steps = 2
[sinks]
names = []
"""
SFT = """
extends = "grpo.toml"
[run]
name = "sft"
[algorithm]
name = "sft"
[evaluation]
at_start = false
at_end = false
"""
STEPS_ALONE = (
    "evaluation.at_start=false",
    "evaluation.at_end=false",
    "checkpoint.every_n_steps=0",
    "checkpoint.at_end=false",
    "logging.rollouts_every_n_steps=0",
)
"""Nothing is measured or kept beside the steps."""
SITE_MODULES = ("acme_judge", "acme_poison", "acme_kit", "acme_liar")
"""Modules that tests install; removed from this process after each."""
BY_THE_CLOCK = ("time/", "tokens_per_second", "generated_tokens_per_second", "generation/engine_restarts", "refit/")
"""Beginnings of the metrics that depend on the clock."""


@frozen
class Workplace:
    """A folder with the recipes grpo.toml and sft.toml; runs go below runs/."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, model: Path) -> "Workplace":
        """Write the recipes."""
        (folder / "grpo.toml").write_text(GRPO.format(model=model))
        (folder / "sft.toml").write_text(SFT)
        return cls(folder)

    def rlcore(self, *arguments: str | Path) -> Result:
        """The command line, in this process."""
        return CliRunner().invoke(cli, [str(argument) for argument in arguments])

    def train(self, recipe: str, *arguments: str) -> Path:
        """A training that has to succeed; returns the run directory."""
        result = self.rlcore("train", recipe, *arguments)
        assert result.exit_code == 0, f"{result.stdout}{result.stderr}"
        assert result.stderr == ""
        return self.folder / result.stdout.rsplit("run directory: ", 1)[1].strip()

    def run(self, name: str) -> Path:
        """The directory of a run."""
        return self.folder / "runs" / name


@frozen
class Site:
    """A folder on sys.path."""

    folder: Path

    def install(self, distribution: str, source: str, entry_points: Mapping[str, Mapping[str, str]]) -> None:
        """Put a module, named as the distribution, and its metadata where an installer would."""
        module = distribution.replace("-", "_")
        assert module in SITE_MODULES
        information = self.folder / f"{module}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = []
        for group, points in entry_points.items():
            lines += [f"[{group}]", *(f"{name} = {module}:{variable}" for name, variable in points.items())]
        (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
        (self.folder / f"{module}.py").write_text(source)
        importlib.invalidate_caches()


def expect_failure(result: Result, exit_code: int, *parts: str) -> str:
    """One clear message on stderr, with these parts in it, and the exit code; returns the message."""
    assert result.exit_code == exit_code, f"{result.exit_code}: {result.stdout}{result.stderr}"
    message: str = result.stderr
    assert message.startswith("error: ")
    assert message.count("error: ") == 1
    assert "Traceback" not in message + result.stdout
    missing = [part for part in parts if part not in message]
    assert not missing, f"{missing} not in: {message}"
    return message


def read_metrics(run_directory: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock, or tells of what went wrong."""
    records = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in record.items() if not name.startswith(BY_THE_CLOCK)} for record in records]


def checkpoints(run_directory: Path) -> list[str]:
    """Everything in the run's folder of checkpoints, half-written ones too."""
    return sorted(path.name for path in (run_directory / "checkpoints").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    """One row a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def close(value: float) -> Any:
    """Equal to rounding in float32."""
    return pytest.approx(value, rel=1e-5, abs=1e-5)

"""Runs with the fakes: a recipe file, and a shorthand to run it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.testing.fakes import FakeTokenizer, fake_registry
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER

RECIPE = """
[model]
path = "none"
[algorithm]
name = "fake"
[environment]
name = "fake"
[run]
num_steps = 6
[data.evaluation]
[training]
prompts_per_step = 8
minibatches_per_step = 2
[optimizer]
learning_rate = 0.1
[rollout]
max_prompt_tokens = 16
max_response_tokens = 8
[logging]
rollouts_every_n_steps = 3
[sinks]
names = []
[evaluation]
every_n_steps = 4
[checkpoint]
every_n_steps = 2
"""

FAKES = {
    "trainer": FAKE_TRAINER,
    "generator": FAKE_GENERATOR,
    "algorithm": FAKE_ALGORITHM,
    "environment": FAKE_ENVIRONMENT,
}
MEASURED = ("time/", "tokens_per_second", "generated_tokens_per_second")
"""Metrics that depend on the clock."""


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., RunPlan]:
    """Prepare the recipe with overrides; runs go below tmp_path/runs."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)

    def prepare_with(*overrides: str, registry: Any = None) -> RunPlan:
        directory = f"run.directory={tmp_path / 'runs'}"
        return prepare(recipe, [directory, *overrides], registry=with_execution(registry or fake_registry()))

    return prepare_with


def with_execution(registry: Registry) -> Registry:
    """The registry with the fake execution, which plans of several ranks need, and each of its plugins once."""
    executions = {entry.name: entry for entry in (*fake_registry().of("execution"), *registry.of("execution"))}
    others = [entry for entry in registry.entries if entry.role != "execution"]
    return evolve(registry, entries=(*others, *executions.values()))


@pytest.fixture
def run(prepared: Callable[..., RunPlan]) -> Callable[..., dict[str, Any]]:
    """Prepare and train; returns the summary."""

    def run_with(
        *overrides: str,
        resume: bool = False,
        progress: Progress | None = None,
        registry: Any = None,
        allow_changes: bool = False,
        replay_schedule: Path | None = None,
    ) -> dict[str, Any]:
        return train(
            evolve(prepared(*overrides, registry=registry), replay_schedule=replay_schedule),
            resume=resume,
            progress=progress or Progress(),
            tokenizer=FakeTokenizer(),
            allow_changes=allow_changes,
        )

    return run_with


@pytest.fixture
def registry_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """The fakes, with other classes for some roles; a provider names its class by import path."""

    def build(**backends: type) -> Registry:
        module = ModuleType("stand_ins")
        providers = dict(FAKES)
        for role, backend in backends.items():
            setattr(module, role, backend)
            providers[role] = evolve(FAKES[role], backend=f"stand_ins:{role}")
        monkeypatch.setitem(sys.modules, "stand_ins", module)
        return Registry.from_providers({role: [provider] for role, provider in providers.items()})  # type: ignore[misc]

    return build


def read_metrics(run_directory: Path, *, timed: bool = False) -> list[dict[str, float]]:
    """metrics.jsonl, by default without what depends on the clock."""
    records = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    if timed:
        return records
    return [{name: value for name, value in record.items() if not name.startswith(MEASURED)} for record in records]

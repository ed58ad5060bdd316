"""Runs of models of values: no generator, held-out rows measured by their values, and what does not go with such a model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import ConfigError, PluginError, capabilities
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.providers import FAKE_TRAINER

from .conftest import read_metrics  # type: ignore[import-not-found]

Prepare, Run = Callable[..., RunPlan], Callable[..., dict[str, Any]]
HEAD = ("algorithm.fake.source=demonstrations", 'algorithm.fake.head="value"')


@pytest.fixture
def rows(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{'abc'[n % 3]}:", "completion": "a" * (n % 4 + 1)}) + "\n" for n in range(12))
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('[environment]\nname = "fake"\n', ""))
    sources = [(f"data.{split}.source=jsonl", f"data.{split}.path={path}") for split in ("train", "evaluation")]
    return (
        *HEAD,
        *sources[0],
        *sources[1],
        "run.num_steps=60",
        "trainer.fake.initial_scale=0.5",
        "evaluation.every_n_steps=30",
        "optimizer.weight_decay=0.0",
    )


def test_a_model_of_values_learns_and_is_measured_by_its_values(
    run: Run, prepared: Prepare, rows: tuple[str, ...], tmp_path: Path
) -> None:
    assert set(prepared(*rows).chosen) == {"trainer", "algorithm", "execution"}
    run(*rows)
    (directory,) = (tmp_path / "runs").iterdir()
    metrics = read_metrics(directory)
    losses = [line["loss/squared_error"] for line in metrics if "loss/squared_error" in line]
    assert losses[-1] < 0.1 < losses[0]
    found = [line["eval/value_mean"] for line in metrics if "eval/value_mean" in line]
    assert 0.5 < found[-1] < 1.5
    assert not any(name.startswith("eval/") and name != "eval/value_mean" for line in metrics for name in line)


def test_a_trainer_without_a_head_of_values_is_refused(prepared: Prepare, rows: tuple[str, ...]) -> None:
    provider = evolve(FAKE_TRAINER, capabilities=FAKE_TRAINER.capabilities - {capabilities.VALUE_HEAD})
    entries = [evolve(entry, provider=provider) if entry.role == "trainer" else entry for entry in fake_registry().entries]
    with pytest.raises(PluginError, match="value_head"):
        prepared(*rows, registry=evolve(fake_registry(), entries=tuple(entries)))


def test_an_environment_beside_a_model_of_values_is_refused(prepared: Prepare) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(*HEAD)
    assert [problem.path for problem in raised.value.problems] == ["environment"]

"""The command line with the run replaced: a recipe to name, prepared values, and calls that are recorded."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field
from click.testing import CliRunner, Result

import rlcore.run.evaluate
import rlcore.run.plan.prepare
import rlcore.run.train
import rlcore_doctor.preview
from rlcore.cli.main import cli
from rlcore.config.data import DataConfig, DatasetConfig
from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice, PluginChoice
from rlcore.config.recipe import Recipe
from rlcore.registry.discovery import Entry, ObserverEntry
from rlcore.spi import Provider
from rlcore_doctor.preview import Preview


def entry(role: str, name: str, priority: int = 50) -> Entry:
    provider = Provider(name=name, spi=(2, 0), config=object, backend="nowhere:Nothing", priority=priority)
    return Entry(role=role, name=name, distribution=f"acme-{name}", version="1.2", provider=provider)


def prepared() -> SimpleNamespace:
    """What `prepare` returns, as far as the command line reads it."""
    recipe = Recipe(
        model=ModelConfig(path="some/model"),
        algorithm=NamedPluginChoice(name="alg"),
        environment=NamedPluginChoice(name="env"),
        data=DataConfig(evaluation=DatasetConfig()),
        generator=PluginChoice(name="gen"),
    )
    roles = {"trainer": "tra", "generator": "gen", "algorithm": "alg", "environment": "env"}
    return SimpleNamespace(
        recipe=recipe,
        chosen={role: entry(role, name) for role, name in roles.items()},
        device="cpu",
        runs_here=True,
        model=SimpleNamespace(dtype="float32"),
        algorithm=SimpleNamespace(needs=SimpleNamespace(source="rollouts")),
        channel="in_process",
        ranks_per_generator=1,
        evaluates=True,
        measures_examples=False,
        registry=SimpleNamespace(warnings=()),
        sinks=(),
        observers=(ObserverEntry(name="obs", distribution="acme-obs", version="1.2", observer=None),),
        notes=("trainer 'tra' (priority 50) is taken, as 'big' (priority 80) cannot be: needs a GPU",),
    )


@define
class Calls:
    """What the commands called, and what these calls do."""

    prepared: list[tuple[Path, list[str]]] = field(factory=list)
    replayed: list[Path] = field(factory=list)
    trained: list[dict[str, Any]] = field(factory=list)
    evaluated: list[dict[str, Any]] = field(factory=list)
    on_train: Callable[[Any], None] = lambda progress: None
    on_prepare: Callable[[], None] = lambda: None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replaces prepare, train and evaluate."""
    calls = Calls()

    def prepare(path: Path, overrides: Any = (), *, replay_schedule: Path | None = None, **_: bool) -> SimpleNamespace:
        calls.replayed += [] if replay_schedule is None else [replay_schedule]
        calls.prepared.append((path, list(overrides)))
        calls.on_prepare()
        return prepared()

    def train(prepared: Any, *, progress: Any, **options: Any) -> dict[str, object]:
        calls.trained.append(options)
        calls.on_train(progress)
        return {}

    def evaluate(prepared: Any, *, checkpoint: Path | None, progress: Any, with_bounds: bool) -> dict[str, float]:
        assert with_bounds
        calls.evaluated.append({"checkpoint": checkpoint})
        progress.phase("evaluation")
        return {"eval/pass@1": 0.625, "eval/response_length_mean": 7.5}

    def preview(prepared: Any) -> Preview:
        return Preview(
            rows={"train": "3 rows of x.jsonl"}, first_prompt="<bos>1+1=\n", target={"answer": "'2'"}, notes=("odd",)
        )

    monkeypatch.setattr(rlcore.run.plan.prepare, "prepare", prepare)
    monkeypatch.setattr(rlcore_doctor.preview, "preview", preview)
    monkeypatch.setattr(rlcore.run.train, "train", train)
    monkeypatch.setattr(rlcore.run.evaluate, "evaluate", evaluate)
    return calls


Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Runs `rlcore` with arguments, without a terminal."""
    monkeypatch.delenv("RLCORE_DEBUG", raising=False)
    return lambda *arguments, **options: CliRunner().invoke(cli, arguments, **options)

"""Whole runs with the sink `mlflow`: resumed, and with a server that is away."""

from pathlib import Path

import pytest
from attrs import evolve

pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")

from mlflow.tracking import MlflowClient

from rlcore.registry.discovery import Registry, discover
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.testing.fakes import FakeTokenizer, fake_registry

RECIPE = """
[model]
path = "none"
[algorithm]
name = "fake"
[environment]
name = "fake"
[training]
prompts_per_step = 4
[rollout]
max_prompt_tokens = 16
max_response_tokens = 8
[logging]
samples_every_n_steps = 1
[sinks]
names = ["mlflow"]
"""


class Notes(Progress):
    """Keeps the warnings."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def registry() -> Registry:
    fakes = tuple(entry for entry in fake_registry().entries if entry.role != "sink")
    return evolve(fake_registry(), entries=(*fakes, *discover().of("sink")))


def run(tmp_path: Path, registry: Registry, uri: str, num_steps: int, *, resume: bool = False) -> list[str]:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    overrides = [f"run.directory={tmp_path / 'runs'}", f"sinks.mlflow.tracking_uri={uri}", f"run.num_steps={num_steps}"]
    progress = Notes()
    prepared = prepare(tmp_path / "recipe.toml", overrides, registry=registry)
    summary = train(prepared, resume=resume, progress=progress, tokenizer=FakeTokenizer())
    assert summary["steps"] == num_steps
    return progress.notes


def test_a_resumed_run_is_one_run_of_the_tracker(tmp_path: Path, registry: Registry) -> None:
    uri = f"file://{tmp_path / 'store'}"
    run(tmp_path, registry, uri, 2)
    run(tmp_path, registry, uri, 4, resume=True)
    client = MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("rlcore").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["rollout.max_response_tokens"] == "8"
    history = client.get_metric_history(found.info.run_id, "reward_mean")
    assert [metric.step for metric in history] == [1, 2, 3, 4]


def test_a_server_that_is_away_costs_one_note(tmp_path: Path, registry: Registry) -> None:
    (note,) = run(tmp_path, registry, "http://127.0.0.1:9", 3)
    assert note.startswith("sink 'mlflow' (rlcore-mlflow ")
    assert "127.0.0.1" in note

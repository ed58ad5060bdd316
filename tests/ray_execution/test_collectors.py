"""Samples that are collected in processes beside the engines: what the driver would have collected itself."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from rlcore_ray.collector_hosts import HostedCollector

from .conftest import Notes, read_metrics

Run = Callable[..., dict[str, Any]]
LAYOUT = ("cluster.gpus_per_node=2", "training.prompts_per_step=6", "run.num_steps=4")


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(
    "options",
    [(), ("rollout.max_turns=2", "environment.ranked.num_turns=2", "rollout.max_response_tokens=30")],
    ids=["one turn", "turns"],
)
def test_metrics_are_those_of_the_driver(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    run(*LAYOUT, *options, "run.name=driver")
    run(*LAYOUT, *options, "cluster.collectors=2", "run.name=collectors")
    runs = tmp_path / "runs"
    assert [file.name for file in sorted((runs / "collectors" / "logs").glob("collector-*.log"))] == [
        "collector-0.log",
        "collector-1.log",
    ]
    assert read_metrics(runs / "collectors") == read_metrics(runs / "driver")


@pytest.mark.usefixtures("local_ray")
def test_workers_start_anew_where_a_collector_dies(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint continues, with the metrics of an undisturbed run."""
    run(*LAYOUT, "run.name=undisturbed")
    send, killed = HostedCollector.send, list[str]()

    def kills(collector: HostedCollector, commands: Sequence[Any]) -> None:
        send(collector, commands)
        if not killed and any(command.name == "forget" for command in commands) and "collector 1" in collector.name:
            killed.append(collector.name)
            ray.kill(collector.actor)

    monkeypatch.setattr(HostedCollector, "send", kills)
    notes = Notes()
    run(*LAYOUT, "cluster.collectors=2", "run.name=killed", progress=notes)
    assert len(killed) == 1
    # Ray may report the other collector's end first.
    assert any("restart 1 of 3" in text and "collector" in text for text in notes.texts), notes.texts
    assert read_metrics(tmp_path / "runs" / "killed") == read_metrics(tmp_path / "runs" / "undisturbed")


@pytest.mark.usefixtures("local_ray")
def test_an_engine_that_dies_is_started_anew_beside_the_others(run: Run, tmp_path: Path) -> None:
    """A collector of two engines goes on with the other one, and the next refit brings the first one back."""
    layout = ("cluster.gpus_per_node=4", "cluster.collectors=2", *LAYOUT[1:])
    run(*layout, "run.name=undisturbed")
    fault = "generator.ranked.fault={kind='memory', rank=1, hook='stream', version=2}"
    notes = Notes()
    run(*layout, fault, f"generator.ranked.folder={tmp_path}", "run.name=failed", progress=notes)
    assert any("the engine of rank 1" in text for text in notes.texts)
    assert read_metrics(tmp_path / "runs" / "failed") == read_metrics(tmp_path / "runs" / "undisturbed")


class Kills(Notes):
    """Kills the engine of the second rank after a step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == 2:
            os.kill(int((self.folder / "generator-1").read_text()), signal.SIGKILL)


@pytest.mark.usefixtures("local_ray")
def test_the_only_engine_of_a_collector_is_started_anew_for_the_same_generation(run: Run, tmp_path: Path) -> None:
    run(*LAYOUT, "run.name=undisturbed")
    engines = ("cluster.collectors=2", "generator.ranked.engine=true", f"generator.ranked.folder={tmp_path}")
    notes = Kills(tmp_path)
    run(*LAYOUT, *engines, "run.name=killed", progress=notes)
    assert any("generator-1 died" in text for text in notes.texts), notes.texts
    assert read_metrics(tmp_path / "runs" / "killed") == read_metrics(tmp_path / "runs" / "undisturbed")

"""A rank whose process is stopped is named while others wait for it, and costs nothing once it goes on."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.run.execution.ray import silence

from .conftest import Notes, read_metrics  # type: ignore[import-not-found]

pytestmark = pytest.mark.usefixtures("local_ray")
POOL = ("cluster.gpus_per_node=2", "evaluation.at_start=false", "run.num_steps=2")
SILENT = re.compile(r"(\w+): rank 1 \(node 127\.0\.0\.1, process (\d+)\) has answered nothing for 1 s")


class Waking(Notes):
    """Lets the process go on that a warning calls silent."""

    def note(self, text: str) -> None:
        super().note(text)
        if found := SILENT.match(text):
            os.kill(int(found[2]), signal.SIGCONT)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "PROBE_S", 0.2)
    monkeypatch.setattr(silence, "SILENT_S", 1.0)


@pytest.mark.parametrize("hook", ["train_step", "export_weights"])
def test_a_stopped_rank_is_named_and_the_run_goes_on_with_it(run: Callable[..., Any], tmp_path: Path, hook: str) -> None:
    progress = Waking()
    stop = (f'trainer.ranked.fault.hook="{hook}"', 'trainer.ranked.fault.kind="stop"', "trainer.ranked.fault.rank=1")
    run(*POOL, *stop, "trainer.ranked.fault.version=2", progress=progress)
    named = [found[1] for text in progress.texts if (found := SILENT.match(text))]
    assert {"train_step": "train_step", "export_weights": "refit"}[hook] in named
    assert "its process is stopped" in progress.texts[0]
    run(*POOL, "run.name=undisturbed")
    assert read_metrics(tmp_path / "runs" / "run") == read_metrics(tmp_path / "runs" / "undisturbed")


def test_a_silent_rank_is_told_once_and_again_when_it_answers() -> None:
    import ray

    never, answered = ray.ObjectRef.from_random(), ray.put("in train_step, at loss.py:7 in loss")
    replies, told = {0: answered, 1: never}, []
    watch = silence.SilenceWatch(call="train_step", ask=replies.__getitem__, name=lambda rank: f"rank {rank}", tell=told.append)
    watch.next_probe = 0.0
    while not told:
        watch.look([0, 1])
    watch.look([0, 1])
    assert len(told) == 1
    assert told[0].startswith("train_step: rank 1 has answered nothing for 1 s: ")

"""Processes killed at random moments: the run ends by itself, with exactly the metrics of a run that nobody disturbs."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import Notes, read_metrics  # type: ignore[import-not-found]

pytestmark = pytest.mark.usefixtures("local_ray")
NUM_KILLS = 10
KINDS = ("trainer-0", "trainer-1", "generator-0", "generator-1", "environment")


class Killer(threading.Thread):
    """Kills a process of each kind in turn, at moments that nothing else decides on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.random = folder, random.Random(0)
        self.killed: list[str] = []
        self.enough = threading.Event()

    def run(self) -> None:
        seen: dict[str, int] = {}
        while len(self.killed) < NUM_KILLS and not self.enough.is_set():
            kind = KINDS[len(self.killed) % len(KINDS)]
            time.sleep(self.random.uniform(0.0, 0.3))
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                process = int((self.folder / kind).read_text())
                if seen.get(kind) != process:
                    os.kill(process, signal.SIGKILL)
                    seen[kind] = process
                    self.killed.append(kind)


@pytest.mark.wide
def test_with_each_kind_killed_twice_it_ends_with_the_same_metrics(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "processes"
    folder.mkdir()
    options = (
        "cluster.gpus_per_node=2",
        "run.num_steps=40",
        "evaluation.every_n_steps=0",
        "generator.ranked.engine=true",
        *(f"{role}.ranked.pause_s=0.02" for role in ("trainer", "generator")),
        *(f"{role}.ranked.folder={folder}" for role in ("trainer", "generator", "environment")),
    )
    run("run.name=whole", *options)
    for file in folder.iterdir():
        file.unlink()
    killer, notes = Killer(folder), Notes()
    killer.start()
    run("run.name=killed", "cluster.max_restarts=20", "refit.max_attempts=4", *options, progress=notes)
    killer.enough.set()
    killer.join()
    assert killer.killed == [KINDS[number % len(KINDS)] for number in range(NUM_KILLS)]
    assert read_metrics(tmp_path / "runs" / "killed") == read_metrics(tmp_path / "runs" / "whole")
    assert sum("from the newest checkpoint" in text for text in notes.texts) >= NUM_KILLS * 2 // len(KINDS) // 2
    assert any("is tried again" in text and "died" in text for text in notes.texts)

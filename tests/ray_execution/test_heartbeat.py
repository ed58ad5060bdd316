"""A rank whose process is stopped is named while others wait for it, and costs nothing once it goes on."""

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlcore_ray import heartbeat
from rlcore_ray.suspend_aware_clock import suspend_aware_time

from .conftest import Notes, read_metrics  # type: ignore[import-not-found]

pytestmark = pytest.mark.usefixtures("local_ray")
POOL = ("cluster.gpus_per_node=2", "evaluation.at_start=false", "run.num_steps=2")
SILENT = re.compile(r"(\w+): rank 1 \(node 127\.0\.0\.1, process (\d+)\) has answered nothing for 1 s")


UNNAMED_S = 30
"""After so long a stopped process goes on that no warning has named, so that the test fails and does not wait for ever."""


class Waking(Notes):
    """Lets the process go on that a warning calls silent."""

    def note(self, text: str) -> None:
        super().note(text)
        if found := SILENT.match(text):
            os.kill(int(found[2]), signal.SIGCONT)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "PROBE_S", 0.2)
    monkeypatch.setattr(heartbeat, "SILENT_S", 1.0)


@pytest.fixture
def none_stopped_for_long() -> Iterator[None]:
    """What this process has started, whatever it is, is not stopped for longer than UNNAMED_S."""
    over, stopped_s = threading.Event(), Counter[int]()

    def wake() -> None:
        while not over.wait(1.0):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    is_stopped = process.status() == psutil.STATUS_STOPPED
                    stopped_s[process.pid] = stopped_s[process.pid] + 1 if is_stopped else 0
                    if stopped_s[process.pid] > UNNAMED_S:
                        process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=wake)
    thread.start()
    yield
    over.set()
    thread.join()


@pytest.mark.wide  # a planted fault keeps one
@pytest.mark.usefixtures("none_stopped_for_long")
@pytest.mark.parametrize(
    ("role", "hook", "calls"),
    [
        ("trainer", "train_step", {"train_step"}),
        ("trainer", "export_weights", {"refit"}),
        ("generator", "stream", {"stream_begin", "stream_add", "stream_collect"}),
    ],
    ids=["training", "refit", "stream"],
)
def test_a_stopped_rank_is_named_and_the_run_goes_on_with_it(
    run: Callable[..., Any], tmp_path: Path, role: str, hook: str, calls: set[str]
) -> None:
    progress = Waking()
    stop = {"hook": f'"{hook}"', "kind": '"stop"', "rank": 1, "version": 2}
    run(*POOL, *(f"{role}.ranked.fault.{key}={value}" for key, value in stop.items()), progress=progress)
    named = {found[1] for text in progress.texts if (found := SILENT.match(text))}
    assert named & calls
    assert any("its process is stopped" in text for text in progress.texts)
    assert any(text.endswith("answers again") for text in progress.texts)
    assert not [text for text in progress.texts if text.startswith(("arrive", "restart"))], (
        "starting takes longer than 1 s, and is no silence; no rank that goes on again is given up"
    )
    run(*POOL, "run.name=baseline_run")
    assert read_metrics(tmp_path / "runs" / "run") == read_metrics(tmp_path / "runs" / "baseline_run")


LIMIT = "for 30 s at most"


def watch_of(call: str, replies: dict[int, Any], silent: heartbeat.SilentRanks) -> heartbeat.HeartbeatMonitor:
    watch = heartbeat.HeartbeatMonitor(call=call, ask=replies.__getitem__, silent=silent, limit=LIMIT)
    watch.next_probe = suspend_aware_time()
    return watch


def look_for(seconds: float, watch: heartbeat.HeartbeatMonitor, ranks: list[int]) -> None:
    started = time.monotonic()
    while time.monotonic() < started + seconds:
        watch.look(ranks)


def test_a_silent_rank_is_told_once_and_again_when_it_answers() -> None:
    import ray

    never, answered = ray.ObjectRef.from_random(), ray.put("in train_step, at loss.py:7 in loss")
    told: list[str] = []
    silent = heartbeat.SilentRanks(lambda rank: f"rank {rank}", told.append)
    watch, beside = (watch_of(call, {0: answered, 1: never}, silent) for call in ("train_step", "stream_collect"))
    while not told:
        watch.look([0, 1])
    look_for(1.2, beside, [1])
    watch.look([0, 1])
    assert len(told) == 1
    assert told[0].startswith("train_step: rank 1 has answered nothing for 1 s: ")
    assert told[0].endswith(f"The run waits for it {LIMIT}")
    silent.heard(1, "stream_collect")
    silent.heard(1, "train_step")
    assert told[1:] == ["stream_collect: rank 1 answers again"]
    watch.look([0, 1])
    assert len(told) == 2, "its answer to this question is on its way"
    while len(told) < 3:  # it has fallen silent once more
        watch.look([1])
    assert told[2].startswith("train_step: rank 1 has answered nothing for 1 s: ")


def test_no_rank_is_silent_while_the_driver_itself_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers have come, but nobody has taken them yet."""
    import ray

    told: list[str] = []
    silent = heartbeat.SilentRanks(lambda rank: f"rank {rank}", told.append)
    watch = watch_of("train_step", {0: ray.ObjectRef.from_random()}, silent)
    watch.look([0])
    monotonic = time.monotonic
    monkeypatch.setattr("rlcore_ray.suspend_aware_clock.COUNTED_S", 0.1)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 60.0)
    watch.look([0])
    assert told == []
    while not told:
        watch.look([0])

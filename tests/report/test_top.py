"""`rlcore top`: all that a run directory says of where time and memory go, in one frame."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from click.testing import Result
from rich.console import Console

from rlcore.run.report.recorded_progress import StatusFile
from rlcore.run.report.timing import Span, append_timeline
from rlcore.spi import NonFiniteError
from rlcore_report.top import frame_of
from rlcore_report.top_view import view

from .made_runs import make_run  # type: ignore[import-not-found]

GIB = 2**30
ENGINE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:num_requests_running_other{engine="0"} 99.0
"""
STEP = {
    "step": 9,
    "time/total_s": 9.0,
    "time/generation_s": 6.0,
    "time/train_s": 3.0,
    "tokens_per_second": 1234.0,
    "async/groups_open": 5.0,
    "async/staleness_mean": 0.5,
    "memory/trainer_idle_gib": 2.5,
    "generation/engine_restarts": 1.0,
}
MEMORY = {"resident": GIB, "reserved": 3 * GIB, "device_used": 30 * GIB, "device_total": 80 * GIB}
CALLS = [{"seconds": 2.5, "function": "step", "episode": "episode 3 of 8 (row \x1b[2J)"}]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of 8 steps on two ranks, in the ninth, with an engine."""
    path = make_run(tmp_path / "first", 8)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(STEP) + "\n")
    append_timeline(
        path / "timeline.jsonl",
        [
            Span(step=9, role="driver", name="train", start=0.0, seconds=(3.0,)),
            Span(step=9, role="trainer", name="train_step", start=0.0, seconds=(1.0, 2.0)),
            Span(step=9, role="generator", name="stream", start=0.0, seconds=(6.0, 5.0)),
        ],
    )
    status = StatusFile(path / "status.json")
    status.begins(9, 20)
    status.close(NonFiniteError("the loss is NaN"))
    (path / "logs/rank-0").mkdir(parents=True)
    (path / "logs/rank-0.log").write_text("--- 2026-01-01 00:00:00 rank 0 (node a, process 7)\nhello\n" * 3)
    (path / "logs/rank-0/vllm-0.prom").write_text(ENGINE)
    (path / "ranks").mkdir()
    for rank, age in ((0, 0.0), (1, 7200.0)):
        state = {"rank": rank, "host": "a", "process": 7, "hook": "train_step", "memory_bytes": MEMORY}
        written = time.time() - age
        (path / f"ranks/rank-{rank}.json").write_text(json.dumps({**state, "written": written, "since": written - 4.0}))
    (path / "slowest_calls.json").write_text(json.dumps({"step": 9, "calls": CALLS}))
    return path


def shown_as_json(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout, parse_constant=pytest.fail)
    return found


def test_a_frame_has_what_the_files_say(invoke: Any, run: Path) -> None:
    result = invoke("top", str(run), "--json")
    assert result.exit_code == 0
    found = shown_as_json(result)
    assert (found["state"], found["exit_code"], found["status"]["step"]) == ("failed", 7, 9)
    assert list(found["phases_s"].items()) == [("generation", 6.0), ("train", 3.0)]
    assert found["queues"] == {"open groups": 5.0, "staleness": 0.5}
    assert found["speeds"] == {"trained": 1234.0}
    assert found["memory_gib"] == {"trainer_idle_gib": 2.5}
    engine = found["engines"]["rank-0/vllm-0"]
    assert (engine["running"], engine["waiting"], engine["kv_cache_share"]) == (7.0, 3.0, 0.25)
    assert [(one["rank"], one["hook"], one["memory_bytes"]) for one in found["ranks"]] == [
        (0, "train_step", MEMORY),
        (1, "train_step", MEMORY),
    ]
    assert found["ranks"][1]["silent_s"] >= 7200.0 > found["ranks"][0]["silent_s"]
    assert [(one["name"], one["seconds"], one["rank"], one["fastest_s"]) for one in found["slow_calls"]] == [
        ("stream", 6.0, 0, 5.0),
        ("train_step", 2.0, 1, 1.0),
    ]
    assert found["slow_episodes"] == CALLS
    assert found["failures"] == {"grader, masked": 24, "tool, asked again": 8, "limit, trained": 8}
    assert (found["failed_rows"]["row 3"], len(found["failed_rows"])) == (17, 5)
    assert (found["engine_restarts"], found["worker_starts"]) == (1, 3)


def test_the_view_shows_each_part_and_nothing_that_a_terminal_obeys(invoke: Any, run: Path) -> None:
    result = invoke("top", str(run), "--once")
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    parts = ["generation", "67%", "1,234", "rank-0/vllm-0", "25%", "30.0 of 80.0", "workers 2"]
    assert [part for part in parts if part not in result.stdout] == []
    assert "silent" not in result.stdout, "a run that has ended is not late"


def test_a_rank_that_writes_nothing_is_marked_while_the_run_goes_on(run: Path) -> None:
    frame = frame_of(run)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(view(evolve(frame, state=evolve(frame.state, state="running")), time.time()))
    marked = [line for line in capture.get().splitlines() if "train_step for" in line]
    assert ["silent for 2 h 00 min" in line for line in marked] == [False, True]
    assert "train_step for 2 h 00 min" in marked[1]


@pytest.mark.parametrize("option", ["--once", "--json"])
def test_a_run_that_has_just_begun_is_shown(invoke: Any, tmp_path: Path, option: str) -> None:
    assert invoke("top", str(tmp_path), option).exit_code == 6, "no run"
    (tmp_path / "recipe.toml").write_text("")
    StatusFile(tmp_path / "status.json")
    assert invoke("top", str(tmp_path), option).exit_code == 0
    frame = frame_of(tmp_path)
    assert (frame.phases_s, frame.ranks, frame.engines, frame.worker_starts) == ({}, [], {}, 0)


def test_a_terminal_shows_a_run_that_has_ended_once(run: Path) -> None:
    """On a terminal of its own: the view ends by itself."""
    here, there = os.openpty()
    command = [sys.executable, "-m", "rlcore", "top", str(run)]
    with subprocess.Popen(command, stdout=there, stderr=there, env={**os.environ, "TERM": "xterm"}) as process:
        os.close(there)
        shown = b""
        while chunk := _read(here):
            shown += chunk
    os.close(here)
    assert process.returncode == 0
    assert b"phase of the last step" in shown


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 2**16)
    except OSError:  # as Linux says that nobody writes any more
        return b""

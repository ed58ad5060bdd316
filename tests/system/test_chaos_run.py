"""The harness of random faults itself, with a program in place of a run: it ends what cannot be resumed, and begins anew."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import chaos_run, run_processes
from .chaos_run import ChaosRun
from .run_processes import MARK, await_end_of_all

PROGRAM = textwrap.dedent("""
    import json, sys, time
    from pathlib import Path

    num_checkpoints, (directory, steps, *resume) = int(sys.argv[1]), sys.argv[2:]
    directory, content, step = Path(directory), 100 * b"intact", 0
    checkpoints, metrics = directory / "checkpoints", directory / "metrics.jsonl"
    if resume and checkpoints.is_dir():
        intact = [one for one in checkpoints.iterdir() if (one / "state").read_bytes() == content]
        if not intact:
            time.sleep(0.2)
            print("error: no intact checkpoint:", flush=True)
            sys.exit(6)
        step = max(int(one.name[5:]) for one in intact)
        lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
        metrics.write_text("".join(lines[:step]))
    else:
        for number in range(num_checkpoints):
            state = directory / "saving" / f"step-{number:06d}" / "state"
            state.parent.mkdir(parents=True, exist_ok=True)
            state.write_bytes(content)
        (directory / "saving").rename(checkpoints)
    for step in range(step + 1, int(steps.partition("=")[2]) + 1):
        with metrics.open("a") as file:
            print(json.dumps({"step": step}), file=file)
        time.sleep(0.05)
""")
"""Saves so many checkpoints as it begins, and none later."""


@pytest.fixture
def run_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    @contextmanager
    def started(folder: Path, arguments: Sequence[str], mark: str, variables: Mapping[str, str]) -> Iterator[object]:
        with (folder / "output").open("ab") as output:
            command = [sys.executable, "-c", PROGRAM, *arguments]
            process = subprocess.Popen(command, stdout=output, stderr=output, env={**variables, MARK: mark})
            yield process
            process.kill()
            process.wait()

    def make(num_checkpoints: int) -> ChaosRun:
        (tmp_path / "temporary").mkdir()
        return ChaosRun(
            folder=tmp_path,
            temporary=tmp_path / "temporary",
            arguments=[str(num_checkpoints), str(tmp_path / "run")],
            directory=tmp_path / "run",
            seed=3,
        )

    monkeypatch.setattr(chaos_run, "started", started)
    return make


@pytest.mark.wide(keep=["1-stopped with the cause named"])  # a busy machine may kill a run of two checkpoints too late
@pytest.mark.parametrize(("num_checkpoints", "outcome"), [(1, "stopped with the cause named"), (2, "killed, resumed")])
def test_a_run_without_an_intact_checkpoint_is_over_and_another_begins(run_of, num_checkpoints: int, outcome: str) -> None:
    chaos = run_of(num_checkpoints)
    chaos.run(4, chaos_run.DAMAGING)
    assert chaos.problems == []
    assert [each.outcome for each in chaos.outcomes] == [outcome] * 4
    assert chaos_run.last_step(chaos.directory) == chaos.num_steps


def test_a_checkpoint_that_nothing_damaged_is_to_be_found(run_of) -> None:
    chaos = run_of(1)
    state = chaos.directory / "checkpoints" / "step-000001" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("damaged")
    chaos.run(0, [])
    assert chaos.problems == ["no intact checkpoint of 1, of which at most 0 were damaged"]


def test_a_process_without_its_main_thread_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); "
    program += "print(flush=True); ctypes.CDLL(None).pthread_exit(None)"
    variables = {**os.environ, MARK: "headless"}
    monkeypatch.setattr(run_processes, "GONE_S", 2.0)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=variables) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(AssertionError, match=f"still there: {process.pid}"):
            await_end_of_all("headless")
        process.kill()
        process.wait()
        await_end_of_all("headless")

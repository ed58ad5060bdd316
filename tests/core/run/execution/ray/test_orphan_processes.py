"""What workers have started does not outlive them, whatever state it is in."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from rlcore.run.execution.ray import orphan_processes
from rlcore.run.execution.ray.orphan_processes import MARK, POLL_S, end_here

SLEEP = "import time; time.sleep(60)"
NESTED = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True).wait()"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes, killed and waited for at the end."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


def start(source: str, pool: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", source], env={**os.environ, MARK: pool})


def living(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def test_children_and_theirs_are_killed_even_where_they_are_stopped(started: list[subprocess.Popen[bytes]]) -> None:
    """Those of another pool are not, nor is what is not marked."""
    started += [start(NESTED, "this"), start(SLEEP, "this"), start(SLEEP, "other"), start(SLEEP, "")]
    parent = psutil.Process(started[0].pid)
    deadline = time.monotonic() + 20
    while not parent.children() and time.monotonic() < deadline:
        time.sleep(0.01)
    (grandchild,) = parent.children()
    started[1].send_signal(signal.SIGSTOP)
    assert end_here("this", []) == []
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
    assert [living(process) for process in started] == [False, False, True, True]


def test_workers_are_waited_for_and_told_where_they_stay(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends them: a process id may be another process's by now."""
    monkeypatch.setattr(orphan_processes, "END_S", 0.3)
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(orphan_processes, "time", clock)
    started.append(start(SLEEP, ""))
    (left,) = end_here("this", [started[0].pid])
    assert sum(waits) == pytest.approx(0.3, abs=2 * POLL_S)
    assert str(started[0].pid) in left
    assert "time.sleep(60)" in left
    assert living(started[0])
    started[0].kill()
    assert end_here("this", [started[0].pid]) == [], "it waits to be noticed, and holds nothing"

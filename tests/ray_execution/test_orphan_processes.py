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

from rlcore_ray import orphan_processes
from rlcore_ray.orphan_processes import MARK, POLL_S, end_here, lives

SLEEP = "import time; time.sleep(60)"
THREAD_ALONE = """
import ctypes, subprocess, threading
def go_on():
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    child.wait()
threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""Ends its main thread; another one has a child, tells its number, and waits for it."""
NESTED = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True).wait()"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes, killed and waited for at the end."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.wait()


def start(source: str, pool: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", source], env={**os.environ, MARK: pool}, stdout=stdout)


def living(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def test_children_and_theirs_are_killed_even_where_they_are_stopped(started: list[subprocess.Popen[bytes]]) -> None:
    """Those of another pool are not, nor is what is not marked."""
    started += [start(NESTED, "this"), start(SLEEP, "this"), start(SLEEP, "other"), start(SLEEP, "")]
    parent = psutil.Process(started[0].pid)
    deadline = time.monotonic() + 300
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


@pytest.mark.skipif(sys.platform != "linux", reason="a main thread that ends ends the process elsewhere")
def test_a_process_whose_main_thread_has_ended_is_killed(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what it has started; and a worker is waited for."""
    started += [start(THREAD_ALONE, "this", stdout=subprocess.PIPE), start(THREAD_ALONE, "other", stdout=subprocess.PIPE)]
    children = []
    for process in started:
        assert process.stdout is not None
        children.append(psutil.Process(int(process.stdout.readline())))
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    assert [process.pid for process in orphan_processes.marked(MARK, "this")] == [started[0].pid, children[0].pid]
    assert end_here("this", []) == []
    assert [living(process) for process in started] == [False, True]
    assert [lives(child) for child in children] == [False, True]
    with monkeypatch.context() as patched:
        patched.setattr(orphan_processes, "END_S", 0.1)
        assert end_here("this", [started[1].pid]) == [str(started[1].pid)]
    assert end_here("other", [started[1].pid]) == []
    assert [lives(child) for child in children] == [False, False]


def test_one_that_shows_its_environment_no_more_is_waited_for(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that is ending, while it gives its device back."""
    started.append(start(SLEEP, "this"))
    looks, found = [], psutil.Process(started[0].pid)
    kill = psutil.Process.kill

    def kill_late(process: psutil.Process) -> None:
        looks.append(process)
        if len(looks) == 3:
            kill(process)

    monkeypatch.setattr(psutil.Process, "kill", kill_late)
    monkeypatch.setattr(orphan_processes, "marked", lambda *_: [] if looks else [found])
    assert end_here("this", []) == []
    assert (looks[:3], living(started[0])) == ([found] * 3, False)

"""Stacks of processes from outside: what is read, what an error shows of it, and what stands there without py-spy."""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.spi import WorkerError
from rlcore_workers.hosted import HostedProcess
from rlcore_workers.stacks import HINT, MAX_CHARACTERS, MAX_SHOWN_LINES, beginning_of, stacks_of

is_installed = Path(sysconfig.get_path("scripts"), "py-spy").is_file() or shutil.which("py-spy") is not None
with_py_spy = pytest.mark.skipif(not is_installed, reason="py-spy is not installed")
PARENT = """
import ctypes, subprocess, sys, threading, time

def in_a_thread():
    time.sleep(1000)

def in_c():
    print("begun", flush=True)
    ctypes.PyDLL(None).sleep(1000)

if len(sys.argv) > 1:
    threading.Thread(target=in_a_thread, daemon=True).start()
    child = subprocess.Popen([sys.executable, sys.argv[0]])
in_c()
"""
HOST = """
import ctypes
from rlcore_workers.hosted import read_order, serve

class Host:
    def stick(self):
        ctypes.PyDLL(None).sleep(1000)

if __name__ == "__main__":
    order = read_order()
    serve(Host(), order, ["stick"])
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that stands still in C, with a thread and a child that does so too."""
    script = tmp_path / "hanging.py"
    script.write_text(PARENT)
    command = [sys.executable, str(script), "parent"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        yield process
        os.killpg(process.pid, signal.SIGKILL)


@with_py_spy
@pytest.mark.parametrize("is_stopped", [False, True])
def test_threads_and_children_are_read_down_to_c(hanging: subprocess.Popen[str], is_stopped: bool) -> None:
    if is_stopped:  # which leaves native code out
        hanging.send_signal(signal.SIGSTOP)
    found = stacks_of(hanging.pid)
    of_parent, _, of_child = found.partition("Those of its descendant ")
    for part in (of_parent, of_child):
        assert "in_c (hanging.py:" in part
        assert is_stopped or "sleep (libc" in part
    assert of_parent.index("in_c (hanging.py:") < of_parent.index("in_a_thread (hanging.py:"), "the main thread comes first"


@with_py_spy
def test_a_process_that_is_gone_has_a_reason() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert "py-spy failed: " in stacks_of(process.pid)


def test_without_py_spy_there_is_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert stacks_of(os.getpid()) == HINT


def test_an_error_shows_the_beginning() -> None:
    assert beginning_of("one\ntwo") == "one\ntwo"
    assert beginning_of("x" * 1000) == "x" * (MAX_CHARACTERS - 1) + "…"
    lines = [str(number) for number in range(MAX_SHOWN_LINES + 3)]
    assert beginning_of("\n".join(lines)).splitlines() == [*lines[:MAX_SHOWN_LINES], "(3 more lines in its log)"]


@with_py_spy
def test_an_engine_that_hangs_is_shown_in_its_error_and_log(tmp_path: Path) -> None:
    (tmp_path / "stuck_host.py").write_text(HOST)
    log, environment = tmp_path / "engine.log", {**os.environ, "PYTHONPATH": str(tmp_path)}
    engine = HostedProcess("engine-0", "stuck_host", None, log, section="generator.mine", environment=environment)
    try:
        engine.await_engine(300.0)
        with pytest.raises(WorkerError) as caught:
            engine.call(lambda host: host.stick(), "stick", 2.0, "refit_timeout_s")
    finally:
        engine.end()
    for text in (str(caught.value), log.read_text()):
        assert "sleep (libc" in text
        assert "stick (stuck_host.py:" in text
    assert "generator.mine.refit_timeout_s" in str(caught.value)

"""The process that hosts an engine ends with the one that started it, and takes calls in several threads."""

import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from unittest import mock

from rlcore_vllm.replicas import host


def test_an_engine_ends_with_its_parent(tmp_path):
    """The parent is killed, so that it can do nothing about it."""
    script = (
        "import os, sys, time; from rlcore_workers.descendants import end_with; end_with(int(sys.argv[1])); "
        "open(sys.argv[2], 'w').write(str(os.getpid())); time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {script!r}, str(os.getpid()), sys.argv[1]], start_new_session=True); "
        "time.sleep(600)"
    )
    file = tmp_path / "pid"
    process = subprocess.Popen([sys.executable, "-c", parent, str(file)])
    _wait_until(lambda: file.exists() and file.read_text())
    pid = int(file.read_text())
    assert _is_alive(pid)
    process.kill()
    process.wait()
    _wait_until(lambda: not _is_alive(pid))


def test_a_call_that_ends_while_it_is_cut_keeps_no_other_from_being_cut(monkeypatch):
    """Another thread collects it between two looks at its number."""
    engine, ending, other = mock.Mock(), Future(), Future()
    engine.generate.side_effect = [ending, other]
    monkeypatch.setattr("rlcore_vllm.engines.engine.Engine", lambda _settings: engine)
    hosted = host.Host(None)
    for number in (1, 2):
        hosted.submit(number, None)

    class Number(int):
        num_looks = 0
        __eq__ = int.__eq__

        def __hash__(self):
            Number.num_looks += 1
            if Number.num_looks == 2:
                ending.set_result(None)
                hosted.collect(1.0)
            return int.__hash__(self)

    hosted.cut([Number(1), 2])
    engine.cut.assert_called_once()
    assert other in engine.cut.call_args.args[0]


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)

"""The process that hosts an engine ends with the one that started it."""

import subprocess
import sys
import time
from pathlib import Path


def test_an_engine_ends_with_its_parent(tmp_path):
    """The parent is killed, so that it can do nothing about it."""
    script = (
        "import os, sys; from rlcore_vllm.host import _end_with; "
        "open(sys.argv[2], 'w').write(str(os.getpid())); _end_with(int(sys.argv[1]))"
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

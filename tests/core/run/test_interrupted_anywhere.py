"""Ctrl-C at any line of a run, in a process of its own: tracing may leave one that no later profile ends in, in Python 3.11."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("interrupted_anywhere.py")


def test_wherever_ctrl_c_comes_the_run_ends_and_is_continued(pytestconfig: pytest.Config) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    ran = subprocess.run(command, cwd=pytestconfig.rootpath, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
    assert "2 passed" in ran.stdout

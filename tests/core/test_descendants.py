"""Descendants in sessions of their own, and of parents that have gone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.descendants import adopt_orphans, descendants, end_descendants

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(1000)
    os._exit(0)
os.wait()
sys.stdin.read()
"""
"""Leaves a process of a session of its own behind, tells its number, and waits."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system tells of no processes in /proc")


@pytest.fixture
def adopting() -> Iterator[tuple[int, int]]:
    """A process that is the parent of all orphans below it, and one of these."""
    ours, theirs = os.pipe()
    if (process := os.fork()) == 0:
        adopt_orphans()
        child = subprocess.Popen([sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=theirs)
        child.wait()
        os._exit(0)
    os.close(theirs)
    with open(ours, encoding="utf-8") as told:
        yield process, int(told.readline())
    os.waitpid(process, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process adopt orphans")
def test_what_has_a_session_of_its_own_is_found_and_ended(adopting: tuple[int, int]) -> None:
    process, daemon = adopting
    assert os.getsid(daemon) not in (os.getsid(0), os.getsid(process))
    assert {process, daemon} <= descendants(os.getpid())
    assert daemon in descendants(process)
    end_descendants(process)
    assert descendants(process) == set()


def test_nobody_descends_from_a_process_that_is_gone() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert descendants(gone.pid) == set()
    end_descendants(gone.pid)

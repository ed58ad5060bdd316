"""Ctrl-C at any line by which an environment begins work."""

from collections.abc import Callable
from pathlib import Path

CASES = Path(__file__).with_name("interrupted_runner.py")


def test_ctrl_c_at_any_moment_of_the_beginning_leaves_nothing_at_work(run_traced: Callable[[Path], str]) -> None:
    assert "1 passed" in run_traced(CASES)

"""Ctrl-C at any line of a run."""

from collections.abc import Callable
from pathlib import Path

CASES = Path(__file__).with_name("interrupted_anywhere.py")


def test_wherever_ctrl_c_comes_the_run_ends_and_is_continued(run_traced: Callable[[Path], str]) -> None:
    assert "2 passed" in run_traced(CASES)

"""Ctrl-C at each line of a time limit's own code."""

from collections.abc import Callable
from pathlib import Path

CASES = Path(__file__).with_name("interrupted_time_limit.py")


def test_ctrl_c_at_each_line_is_one(run_traced: Callable[[Path], str]) -> None:
    assert "1 passed" in run_traced(CASES)

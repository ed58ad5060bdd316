"""Ctrl-C at each line of a time limit's own code: it is a KeyboardInterrupt, and the handlers are those of before."""

import itertools
import os
import signal
import sys
from types import FrameType
from typing import Any

import pytest

from rlcore import time_limit


class Lines:
    """Sends SIGINT at the n-th line that the module of time limits executes."""

    def __init__(self, at: int) -> None:
        self.at, self.number = at, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Lines | None":
        if frame.f_globals.get("__name__") != time_limit.__name__:
            return None
        if event == "line":
            self.number += 1
            if self.number == self.at:
                os.kill(os.getpid(), signal.SIGINT)
        return self


def limited() -> None:
    """Do a little within a time limit."""
    with time_limit.time_limit("a sum", 60.0):
        sum(range(10))


@pytest.mark.own_process
def test_ctrl_c_at_each_line_is_one() -> None:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    for at in itertools.count(1):
        lines = Lines(at)
        sys.settrace(lines)
        try:
            limited()
            caught = False
        except KeyboardInterrupt:
            caught = True
        finally:
            sys.settrace(None)
        assert {number: signal.getsignal(number) for number in kept} == kept, f"at line {at}"
        if lines.number < at:
            break
        assert caught, f"at line {at}"
    assert at > 20
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0

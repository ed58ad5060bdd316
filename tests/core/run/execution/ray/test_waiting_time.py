"""The clock of those who wait leaves out what the process itself stood still."""

import time

import pytest

from rlcore.run.execution.ray.waiting_time import LONGEST_LOOK_S, WaitingClock


def test_it_goes_on_while_somebody_looks_and_leaves_out_what_nobody_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    clock = WaitingClock()
    began = clock.now()
    for _ in range(10):
        passed[0] += LONGEST_LOOK_S
        clock.now()
    assert clock.now() - began == 10 * LONGEST_LOOK_S
    passed[0] += 3600.0
    assert clock.now() - began == 10 * LONGEST_LOOK_S, "the process was stopped"
    passed[0] += 1.0
    assert clock.now() - began == 10 * LONGEST_LOOK_S + 1.0

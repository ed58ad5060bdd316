"""The clock of those who wait leaves out what the process itself stood still."""

import time
from threading import Thread

import pytest

from rlcore_ray.suspend_aware_clock import COUNTED_S, LONGEST_LOOK_S, SuspendAwareClock


def test_it_goes_on_while_somebody_looks_and_leaves_out_what_nobody_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    clock = SuspendAwareClock()
    began = clock.now()
    for _ in range(10):
        passed[0] += LONGEST_LOOK_S
        clock.now()
    assert clock.now() - began == 10 * LONGEST_LOOK_S
    before = clock.now()
    passed[0] += 3600.0
    assert clock.now() - before == COUNTED_S, "the process was stopped"
    passed[0] += 1.0
    assert clock.now() - before == COUNTED_S + 1.0


def test_a_limit_ends_where_every_look_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    clock = SuspendAwareClock()
    began = clock.now()
    for _ in range(300):
        passed[0] += LONGEST_LOOK_S + 1.0
        clock.now()
    assert clock.now() - began >= 300.0


def test_threads_that_look_at_once_see_it_go_forward_only() -> None:
    clock, went_back = SuspendAwareClock(), list[float]()

    def look() -> None:
        last = clock.now()
        for _ in range(2000):
            now = clock.now()
            if now < last:
                went_back.append(last - now)
            last = now

    threads = [Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert went_back == []

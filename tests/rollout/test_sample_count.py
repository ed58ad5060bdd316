"""Samples and seconds, on a clock that the tests turn."""

from types import SimpleNamespace

import pytest

from rlcore_rollout import request_queue
from rlcore_rollout.request_queue import SampleCount


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(request_queue, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def seconds(count: SampleCount) -> tuple[float, float, float]:
    return count.idle_s(), count.busy_s(), count.stopped_s()


def test_seconds_are_busy_where_a_stream_runs_and_a_sample_is_asked_for(now: list[float]) -> None:
    count = SampleCount()
    now[0] += 1.0  # nothing is asked for, and no stream has run
    count.ask(3)
    now[0] += 10.0  # no stream runs yet
    count.generating(True)
    now[0] += 100.0
    assert seconds(count) == (1.0, 100.0, 0.0)
    count.add_arrived(1, 1)
    now[0] += 1000.0
    count.generating(False)
    now[0] += 10000.0
    assert seconds(count) == (1.0, 1100.0, 10000.0)
    count.withdraw(2)
    now[0] += 1.0
    assert seconds(count) == (2.0, 1100.0, 10001.0)


def test_what_is_counted_begins_anew_and_what_is_under_way_goes_on(now: list[float]) -> None:
    count = SampleCount()
    count.generating(True)
    count.ask(3)
    now[0] += 5.0
    assert count.add_arrived(2, 1) == (1, 2)
    count.begin()
    now[0] += 2.0
    assert seconds(count) == (0.0, 2.0, 0.0)
    assert count.add_arrived(1, 1) == (1, 1)

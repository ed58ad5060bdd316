"""Seconds by phase, on a clock that the tests turn."""

from types import SimpleNamespace

import pytest

from rlcore.run.report import timing
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import STEP_PHASES, PhaseClock, idle_seconds


class Watched(Progress):
    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, name: str) -> None:
        self.phases.append(name)


class Time:
    """Seconds that pass where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: time.now))
    return time


def test_phases_add_up_and_what_none_covers_is_other(time: Time) -> None:
    progress = Watched()
    clock = PhaseClock(progress)
    time.passes(5.0)  # set-up
    clock.begin_step()
    for seconds in (1.0, 2.0):
        with clock.phase("generation"):
            time.passes(seconds)
    with clock.phase("train"):
        time.passes(4.0)
    time.passes(0.5)
    metrics = clock.end_step()
    given = {"time/total_s": 7.5, "time/generation_s": 3.0, "time/train_s": 4.0, "time/other_s": 0.5}
    assert metrics == {f"time/{name}_s": 0.0 for name in STEP_PHASES} | given
    assert progress.phases == ["generation", "generation", "train"]


def test_a_step_counts_nothing_of_the_one_before_and_totals_go_on(time: Time) -> None:
    clock = PhaseClock(Progress())
    for seconds in (1.0, 2.0):
        clock.begin_step()
        with clock.phase("refit"):
            time.passes(seconds)
        assert clock.end_step()["time/refit_s"] == seconds
        with clock.phase("checkpoint"):
            time.passes(8.0)
    assert clock.totals == {"refit": 3.0, "checkpoint": 16.0, "other": 0.0, "total": 3.0}


def test_a_phase_that_fails_took_its_time(time: Time) -> None:
    clock = PhaseClock(Progress())
    with pytest.raises(KeyError), clock.phase("train"):
        time.passes(2.0)
        raise KeyError
    assert clock.totals["train"] == 2.0


def test_a_phase_outside_of_the_steps_own_makes_no_negative_rest(time: Time) -> None:
    clock = PhaseClock(Progress())
    clock.begin_step()
    with clock.phase("train"), clock.phase("refit"):
        time.passes(1.0)
    assert clock.end_step()["time/other_s"] == 0.0


def test_idle_is_what_neither_computes() -> None:
    times = {"time/total_s": 10.0, "time/train_s": 4.0, "time/logprobs_s": 1.0, "time/generation_s": 3.0, "time/refit_s": 2.0}
    assert idle_seconds(times, 3.0) == {"time/trainer_idle_s": 5.0, "time/generator_idle_s": 7.0}
    assert idle_seconds(times, None) == {"time/trainer_idle_s": 5.0}
    assert idle_seconds(times, 10.5)["time/generator_idle_s"] == 0.0

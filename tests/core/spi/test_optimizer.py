"""The learning rate's course, as shares of the peak and as the context says it."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import ScheduleSpec


def shares(schedule: ScheduleSpec, num_steps: int) -> list[float]:
    return [schedule.share(step, num_steps) for step in range(num_steps + 2)]


def test_shares_of_the_peak() -> None:
    assert shares(ScheduleSpec(), 2) == [1.0, 1.0, 1.0, 1.0]
    assert shares(ScheduleSpec(warmup_steps=2), 2) == [0.5, 1.0, 1.0, 1.0]
    linear = ScheduleSpec(warmup_steps=2, decay="linear", min_learning_rate_ratio=0.2)
    assert shares(linear, 6) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert shares(ScheduleSpec(decay="cosine"), 2) == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert shares(ScheduleSpec(warmup_steps=4, decay="cosine"), 2) == [0.25, 0.5, 0.75, 1.0]


schedules = st.builds(
    ScheduleSpec,
    warmup_steps=st.integers(0, 50),
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    min_learning_rate_ratio=st.floats(0, 1),
)


@given(schedules, st.integers(1, 100))
def test_it_rises_to_the_peak_and_falls_to_the_ratio(schedule: ScheduleSpec, num_steps: int) -> None:
    found = [schedule.share(step, num_steps) for step in range(num_steps + 60)]
    rise, fall = found[: schedule.warmup_steps], found[schedule.warmup_steps :]
    assert all(one < other for one, other in pairwise(rise))
    assert {*rise[-1:], fall[0]} == {1.0}
    assert all(one >= other for one, other in pairwise(fall))
    assert fall[-1] == pytest.approx(1.0 if schedule.decay == "constant" else schedule.min_learning_rate_ratio)

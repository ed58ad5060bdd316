"""Turns of generation that runs ahead, beside the schedule that a run has."""

import numpy as np
import pytest

from rlcore_plan.lengths import response_lengths
from rlcore_plan.turns import generation_turns
from rlcore_rollout.schedule import Schedule, SchedulePolicy

GROUPS = 512


def scheduled(lengths: tuple[float, ...], samples: int, max_staleness: int, num_turns: int) -> list[float]:
    """The tokens of each turn of a run that takes turns, with answers drawn from the distribution of these quantiles."""
    policy = SchedulePolicy(groups_per_step=GROUPS, num_steps=10 * num_turns, max_staleness=max_staleness)
    schedule, random = Schedule(policy), np.random.default_rng(0)
    ends: dict[int, float] = {}
    clock, turns = 0.0, []
    for _ in range(num_turns):
        for number in schedule.admit():
            drawn = np.interp(random.random(samples) * len(lengths) - 0.5, np.arange(len(lengths)), lengths)
            ends[number] = clock + float(drawn.max())
        began, running = clock, sorted(schedule.running, key=lambda one: ends[one])
        while not schedule.can_take():
            number = running.pop(0)
            clock = ends[number]
            schedule.end(number, has_signal=True)
        schedule.take()
        schedule.train()
        turns.append(clock - began)
    return turns


@pytest.mark.wide(sample=8)
@pytest.mark.parametrize("mean", [300.0, 1500.0])
@pytest.mark.parametrize("samples", [1, 8, 32])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_turns_are_those_of_the_schedule(max_staleness: int, samples: int, mean: float) -> None:
    """Over and over; of answers half as long as the limit most groups reach it, and some turns have nothing to do."""
    lengths = response_lengths(mean, 3000)
    turns = generation_turns(lengths, samples, max_staleness + 1)
    found = scheduled(lengths, samples, max_staleness, 3 * (max_staleness + 1))
    assert found == pytest.approx([*turns] * 3, abs=0.05 * lengths[-1])


def test_turns_together_are_the_longest_answer() -> None:
    lengths = response_lengths(795.0, 3946)
    assert generation_turns(lengths, 32, 1) == (3946.0,)
    for num_steps in (2, 3, 8):
        turns = generation_turns(lengths, 32, num_steps)
        assert len(turns) == num_steps
        assert min(turns) >= 0.0
        assert sum(turns) == pytest.approx(3946.0)


def test_answers_of_one_length_end_in_the_first_turn() -> None:
    assert generation_turns((512.0,) * 128, 8, 3) == (512.0, 0.0, 0.0)

"""Schedules of groups, in every order of events: no group is lost, repeated or too old, and none is waited for in vain."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.spi import RewardError
from rlcore_rollout.schedule import Position, Schedule, SchedulePolicy


def policy(**options: Any) -> SchedulePolicy:
    return SchedulePolicy(**{"groups_per_step": 2, "num_steps": 100, **options})


def end(schedule: Schedule, *numbers: int, has_signal: bool = True) -> None:
    for number in numbers:
        schedule.end(number, has_signal=has_signal)


def test_at_no_staleness_a_step_trains_on_the_groups_that_began_with_its_weights() -> None:
    schedule = Schedule(policy())
    assert schedule.admit() == [0, 1]
    assert schedule.admit() == []
    end(schedule, 1)
    assert (schedule.can_take(), schedule.take()) == (False, [])
    end(schedule, 0)
    assert schedule.take() == [0, 1]
    assert schedule.admit() == []  # not before the batch is trained on
    assert schedule.train() == [0, 1]
    assert schedule.admit() == [2, 3]


def test_groups_of_later_steps_run_ahead_as_far_as_the_bound() -> None:
    schedule = Schedule(policy(max_staleness=2))
    assert schedule.admit() == [0, 1, 2, 3, 4, 5]
    end(schedule, 5, 3)
    assert schedule.take() == [3, 5]  # what has ended first, since the others can still be trained on in time
    assert schedule.metrics()["async/staleness_max"] == 0.0
    schedule.train()
    assert schedule.admit() == [6, 7]
    end(schedule, 6, 7)
    assert schedule.take() == []  # of 0, 1, 2 and 4 the last two steps of their bound can only take two each
    end(schedule, 0)
    assert schedule.take() == []
    end(schedule, 4)
    assert schedule.take() == [0, 4]
    assert schedule.metrics()["async/staleness_max"] == 1.0


def test_dropped_groups_make_room_for_others() -> None:
    schedule = Schedule(policy(max_staleness=1, on_stale="drop"))
    assert schedule.admit() == [0, 1, 2, 3]
    end(schedule, 0, 1)
    assert schedule.take() == [0, 1]
    assert schedule.train() == [0, 1]
    assert schedule.admit() == [4, 5]
    end(schedule, 4, 5)
    assert schedule.take() == [4, 5]
    assert sorted(schedule.train()) == [2, 3, 4, 5]
    assert schedule.dropped == [2, 3]
    assert schedule.admit() == [6, 7, 8, 9]


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_is_replaced_while_a_batch_is_trained_on_counts_for_the_next(is_killed: bool) -> None:
    rules = policy(max_staleness=1, max_refills=9)
    schedule = Schedule(rules)
    assert schedule.admit() == [0, 1, 2, 3]
    assert not schedule.end(0, has_signal=False)
    assert schedule.admit() == [4]
    end(schedule, 1, 2)
    assert schedule.take() == [1, 2]
    assert not schedule.end(3, has_signal=False)
    assert schedule.metrics()["async/groups_refilled"] == 1.0
    assert (schedule.refilled, schedule.position().refilled) == ([0], [0, 3])
    schedule.train()
    assert schedule.refilled == [3]
    if is_killed:
        schedule = Schedule(rules, schedule.position())
    schedule.admit()
    end(schedule, 4, 5)
    schedule.take()
    assert schedule.metrics()["async/groups_refilled"] == 1.0
    schedule.train()
    assert schedule.refilled == []


def test_extra_groups_let_a_step_go_on_without_its_slowest() -> None:
    schedule = Schedule(policy(num_extra=1, on_stale="drop"))
    assert schedule.admit() == [0, 1, 2]
    end(schedule, 0, 2)
    assert schedule.take() == [0, 2]
    assert sorted(schedule.train()) == [0, 1, 2]
    assert schedule.admit() == [3, 4, 5]


def test_groups_without_a_signal_are_replaced_within_a_bound() -> None:
    schedule = Schedule(policy(max_refills=2))
    schedule.admit()
    assert not schedule.end(0, has_signal=False)
    assert schedule.admit() == [2]
    assert not schedule.end(2, has_signal=False)
    assert schedule.admit() == [3]
    end(schedule, 1)
    with pytest.raises(RewardError, match="step 1.*3 groups.*1 of 2.*at most 2"):
        schedule.end(3, has_signal=False)


def test_nothing_begins_that_no_step_would_train_on() -> None:
    schedule = Schedule(policy(max_staleness=3, num_steps=2))
    assert schedule.admit() == [0, 1, 2, 3]
    end(schedule, *range(4))
    for taken in ([0, 1], [2, 3]):
        assert schedule.take() == taken
        schedule.train()
        assert schedule.admit() == []


def test_a_group_that_begins_again_is_as_young_as_the_weights() -> None:
    schedule = Schedule(policy(max_staleness=1))
    schedule.admit()
    end(schedule, 0, 1)
    schedule.take()
    schedule.train()
    schedule.restart(2)
    schedule.restart(3)
    schedule.admit()
    end(schedule, 4, 5)
    assert schedule.take() == [4, 5]


def test_a_complete_group_may_begin_again_too() -> None:
    schedule = Schedule(policy(), Position(next_number=4, trained=1, running={3: 1}, complete={2: 0}))
    schedule.restart(2)
    assert schedule.position() == Position(next_number=4, trained=1, running={2: 1, 3: 1})


def test_what_other_rules_left_open_is_trained_on_first() -> None:
    """More groups, and older ones, than these rules would have let begin."""
    schedule = Schedule(policy(), Position(next_number=7, trained=3, running={6: 2}, complete={3: 1, 4: 1, 5: 2}))
    assert schedule.admit() == []
    assert schedule.take() == [3, 4]
    schedule.train()
    assert schedule.admit() == []
    assert schedule.take() == []
    end(schedule, 6)
    assert schedule.take() == [5, 6]
    schedule.train()
    assert schedule.admit() == [7, 8]


def test_what_is_too_old_for_these_rules_is_dropped() -> None:
    position = Position(next_number=7, trained=3, running={6: 1}, complete={3: 1, 4: 3})
    schedule = Schedule(policy(on_stale="drop"), position)
    assert (schedule.dropped, schedule.open_groups) == ([6, 3], [4])
    assert schedule.admit() == [7]


def test_a_batch_is_trained_on_in_several_steps() -> None:
    schedule = Schedule(policy(max_staleness=1, reuse=2, num_steps=3))
    assert schedule.admit() == [0, 1]  # what begins later is as young as the steps that train on it
    end(schedule, 0, 1)
    assert schedule.take() == [0, 1]
    assert schedule.train() == []
    assert schedule.admit() == []
    assert (schedule.reuses, schedule.can_take(), schedule.take()) == (True, True, [0, 1])
    assert schedule.metrics()["async/staleness_max"] == 1.0
    assert schedule.position() == Position(next_number=2, trained=1, reused={0: 0, 1: 0})
    assert schedule.train() == [0, 1]
    assert schedule.admit() == [2, 3]


def test_nothing_begins_that_would_be_too_old_for_the_next_batch() -> None:
    schedule = Schedule(policy(max_staleness=1, reuse=2, on_stale="drop", num_extra=1))
    assert schedule.admit() == [0, 1, 2]
    end(schedule, 0, 1)
    schedule.take()
    assert schedule.train() == [2]
    assert schedule.admit() == []
    schedule.take()
    schedule.train()
    assert schedule.admit() == [3, 4, 5]


def test_batches_run_ahead_as_far_as_the_last_step_that_uses_them_is_within_the_bound() -> None:
    rules = policy(max_staleness=4, reuse=2)
    assert (rules.first_staleness, rules.batches_ahead, rules.capacity) == (3, 1, 4)
    assert policy(max_staleness=1, reuse=2).starts_together


def test_a_batch_takes_the_groups_for_which_the_next_one_comes_too_late() -> None:
    """The bound of 3 lies between two batches, at 2 and at 4 steps."""
    rules = policy(groups_per_step=1, max_staleness=4, reuse=2, num_steps=6)
    schedule = Schedule(rules, Position(next_number=3, trained=2, running={1: 0}, complete={2: 2}))
    assert not schedule.can_take()
    end(schedule, 1)
    assert schedule.take() == [1]


def test_a_batch_of_which_a_group_begins_again_waits_until_it_is_whole() -> None:
    schedule = Schedule(policy(max_staleness=1, reuse=2), Position(next_number=2, trained=1, reused={0: 0, 1: 0}))
    assert schedule.open_groups == [0, 1]
    schedule.restart(0)
    assert not schedule.can_take()
    end(schedule, 0)
    assert schedule.take() == [0, 1]


def test_a_batch_is_closed_where_other_rules_use_it_no_more() -> None:
    schedule = Schedule(policy(max_staleness=1), Position(next_number=2, trained=1, reused={0: 0, 1: 0}))
    assert (schedule.open_groups, schedule.admit()) == ([], [2, 3, 4, 5])


policies = st.builds(
    lambda reuse, staleness, **options: {**options, "reuse": reuse, "max_staleness": staleness + reuse - 1},
    reuse=st.integers(1, 3),
    staleness=st.integers(0, 3),
    groups_per_step=st.integers(1, 3),
    num_steps=st.integers(1, 6),
    on_stale=st.sampled_from(["wait", "drop", "rescore"]),
    max_refills=st.none() | st.just(10**6),
)


@settings(deadline=None, max_examples=300)
@given(options=policies, data=st.data())
def test_every_order_of_events_trains_on_each_group_once_and_in_time(options: dict[str, Any], data: st.DataObject) -> None:
    """Groups end in any order, batches are taken at any time, and the process is killed at any event: what its checkpoint, the
    position behind any earlier step or within one, goes on with is what would have gone on."""
    extra = data.draw(st.integers(0, 2)) if options["on_stale"] != "wait" else 0
    rules = SchedulePolicy(**options, num_extra=extra)
    schedule = Schedule(rules)
    begun: list[int] = []
    closed: list[int] = []
    trained: list[int] = []
    batch: list[int] = []
    has_begun_at: dict[int, int] = {}

    def admit() -> None:
        for number in schedule.admit():
            begun.append(number)
            has_begun_at[number] = schedule.trained

    for event in range(400):
        if schedule.trained == rules.num_steps:
            break
        admit()
        assert not schedule.is_stuck, "nothing can happen: the run would wait for ever"
        if data.draw(st.integers(0, 9)) == 0:  # killed
            position = schedule.position()
            schedule = Schedule(
                rules, Position(**{name: getattr(position, name) for name in Position.__slots__ if name[0] != "_"})
            )
        if schedule.can_take() and (not schedule.running or data.draw(st.booleans())):
            taken = schedule.take()
            assert len(taken) == rules.groups_per_step
            assert taken == sorted(taken)
            if rules.on_stale != "rescore":
                assert all(schedule.trained - has_begun_at[number] <= rules.max_staleness for number in taken)
            if schedule.trained % rules.reuse:
                assert taken == batch
            else:
                trained += taken
            batch = taken
            closed += schedule.train()
        elif schedule.running:
            number = data.draw(st.sampled_from(sorted(schedule.running)))
            # Not for ever: groups without a signal alone would make no step.
            has_signal = rules.max_refills is None or event > 200 or data.draw(st.integers(0, 3)) > 0
            if not schedule.end(number, has_signal=has_signal):
                closed.append(number)
    else:
        raise AssertionError("400 events made no run")
    assert begun == list(range(len(begun)))
    assert len(set(trained)) == len(trained) == -(-rules.num_steps // rules.reuse) * rules.groups_per_step
    still_open = {*schedule.position().running, *schedule.position().complete, *schedule.position().reused}
    assert sorted([*closed, *still_open]) == begun
    if rules.on_stale == "wait" and rules.max_refills is None:
        assert sorted(trained) == begun

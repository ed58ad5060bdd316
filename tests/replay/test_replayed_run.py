"""Replayed schedules, in every order in which what a step generates may end: the batches, ages and counts of the file."""

from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore_replay.replayed_run import ReplaySchedule
from rlcore_replay.rollout_trace import RolloutTrace, wrong_with
from rlcore_rollout.schedule import Position, Schedule, SchedulePolicy
from rlcore_rollout.trace_records import GroupRecord, SampleRecord, StepRecord

policies = st.builds(
    lambda reuse, staleness, **options: SchedulePolicy(reuse=reuse, max_staleness=staleness + reuse - 1, **options),
    reuse=st.integers(1, 3),
    staleness=st.integers(0, 3),
    groups_per_step=st.integers(1, 3),
    num_steps=st.integers(1, 6),
    on_stale=st.sampled_from(["wait", "drop", "rescore"]),
    max_refills=st.none() | st.just(10**6),
)


def record_of(schedule: Schedule, ended: dict[int, int]) -> StepRecord:
    """The step whose batch was taken; a group says a token with the weights of each step from its beginning to its end."""
    groups = []
    for number in [] if schedule.reuses else sorted(schedule.training):
        began = schedule.began(number)
        spans = tuple((version, 1) for version in range(began, ended[number] + 1))
        groups.append(GroupRecord(number=number, began=began, samples=(SampleRecord(turns=(spans,), digest=""),)))
    return StepRecord(
        step=schedule.trained + 1,
        version=schedule.trained,
        groups=tuple(groups),
        next=schedule.next_number,
        num_open=schedule.num_open,
        dropped=tuple(schedule.dropped),
        refilled=tuple(schedule.refilled),
    )


def recorded_run(rules: SchedulePolicy, data: st.DataObject) -> tuple[list[StepRecord], list[dict[str, float]]]:
    """A run whose groups end in any order: what it records, and its figures."""
    schedule, ended, records, figures = Schedule(rules), dict[int, int](), list[StepRecord](), []
    while schedule.trained < rules.num_steps:
        schedule.admit()
        if schedule.can_take() and (not schedule.running or data.draw(st.booleans())):
            schedule.take()
            records.append(record_of(schedule, ended))
            figures.append(schedule.metrics())
            schedule.train()
        elif schedule.running:
            number = data.draw(st.sampled_from(sorted(schedule.running)))
            ended[number] = schedule.trained
            schedule.end(number, has_signal=rules.max_refills is None or data.draw(st.integers(0, 3)) > 0)
    return records, figures


@settings(deadline=None, max_examples=200)
@given(rules=policies, data=st.data())
def test_whatever_ends_first_a_replay_has_the_batches_of_the_file(rules: SchedulePolicy, data: st.DataObject) -> None:
    """It may be killed at any event, and go on from its position, or as a run without the file."""
    records, figures = recorded_run(rules, data)
    assert not list(wrong_with(records, rules.groups_per_step, 1, rules.reuse))
    recorded = RolloutTrace(steps=records, group_size=1)
    schedule: Schedule = ReplaySchedule(rules, recorded, Position())
    num_said: dict[int, int] = {}
    again, shown = [], []
    for _ in range(rules.num_steps):
        schedule.admit()
        if data.draw(st.booleans()):
            position = schedule.position()
            check_nothing_is_lost(position, records, rules)
            schedule = ReplaySchedule(rules, recorded, position)
            schedule.admit()
        ended = set()
        for number in data.draw(st.permutations(sorted(schedule.running))):
            while (span := recorded.span(number, 0, num_said.get(number, 0))) is not None and span[0] <= schedule.trained:
                num_said[number] = num_said.get(number, 0) + span[1]
            if span is None:
                schedule.end(number, has_signal=data.draw(st.booleans()))
                ended.add(number)
        assert not schedule.can_take()
        assert isinstance(schedule, ReplaySchedule)
        schedule.generated()
        of_batch = schedule.trained - schedule.trained % rules.reuse
        assert schedule.take() == [group.number for group in records[of_batch].groups]
        again.append(
            record_of(
                schedule,
                {number: schedule.began(number) + said - 1 for number, said in num_said.items() if number in schedule.training},
            )
        )
        shown.append(schedule.metrics())
        schedule.train()
    assert again == records
    assert shown == figures


def check_nothing_is_lost(position: Position, records: list[StepRecord], rules: SchedulePolicy) -> None:
    """A run without the file goes on with each group that no step has closed, and with none twice."""
    past = records[: position.trained]
    trained = {group.number for record in past for group in record.groups}
    given_up = {number for record in past for number in (*record.dropped, *record.refilled)}
    assert position.reused.keys() <= trained
    still_open = position.running.keys() | position.complete.keys()
    assert not still_open & (trained | given_up)
    assert still_open | trained | given_up == set(range(position.next_number))
    schedule = Schedule(rules, position)
    assert all(number >= position.next_number for number in schedule.admit())

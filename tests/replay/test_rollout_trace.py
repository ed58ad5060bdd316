"""The steps of a recorded run: the spans of its samples, and what makes no schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore_replay.rollout_trace import RolloutTrace, differing, wrong_with
from rlcore_rollout.trace_records import GroupRecord, SampleRecord, StepRecord

from ..rollout.test_trace_records import samples  # type: ignore[import-not-found]


@given(sample=samples, data=st.data())
def test_the_spans_of_a_turn_follow_one_another(sample: SampleRecord, data: st.DataObject) -> None:
    """Version v began with step v + 1."""
    versions = sorted({0, *(version for turn in sample.turns for version, _ in turn)})
    records = [StepRecord(step=version + 1, version=version, groups=(), next=9) for version in versions]
    group = GroupRecord(number=4, began=0, samples=(sample, sample))
    last = StepRecord(step=60, version=60, groups=(group,), next=9)
    recorded = RolloutTrace(steps=[*records, last], group_size=2)
    turn = data.draw(st.integers(0, len(sample.turns)))
    found, num_said = [], 0
    while (span := recorded.span(9, turn, num_said)) is not None:
        found.append(span)
        num_said += span[1]
    assert found == list(sample.turns[turn] if turn < len(sample.turns) else ())


def test_a_version_is_of_the_first_step_that_began_with_it() -> None:
    """A step without an update leaves its weights to the next."""
    sample = SampleRecord(turns=(((0, 1), (0, 2)),), digest="")
    group = GroupRecord(number=0, began=0, samples=(sample,))
    records = [StepRecord(step=1, version=0, groups=(), next=1), StepRecord(step=2, version=0, groups=(group,), next=1)]
    recorded = RolloutTrace(steps=records, group_size=1)
    assert [recorded.span(0, 0, number) for number in (0, 1, 3)] == [(0, 1), (0, 2), None]


def step(number: int = 1, *of_groups: GroupRecord) -> StepRecord:
    return StepRecord(step=number, version=max(1, number - 1), groups=of_groups or (group(2 * number),), next=2 * number + 1)


def group(number: int, began: int = 0, version: int = 1, num_samples: int = 1) -> GroupRecord:
    sample = SampleRecord(turns=(((version, 2),),), digest="ab")
    return GroupRecord(number=number, began=began, samples=(sample,) * num_samples)


def test_the_groups_with_other_tokens_are_named() -> None:
    other = GroupRecord(number=3, began=0, samples=(SampleRecord(turns=(), digest="cd"),))
    assert differing(step(1, group(1), group(3)), step(1, group(1), other)) == [3]


@pytest.mark.parametrize(
    ("records", "parts"),
    [
        ([step(1), step(3)], ("step 3", "step 2")),
        ([step(2)], ("step 2", "step 1")),
        ([step(1, group(0), group(1))], ("2 groups", "1")),
        ([step(1), step(2, group(2))], ("group 2", "one step")),
        ([step(1, group(0, num_samples=2))], ("2 samples", "1")),
        ([step(1, group(0, began=1))], ("group 0", "before step 1")),
        ([step(1, group(7))], ("group 7", "before step 1")),
        ([step(1, group(0, version=2))], ("version 2", "up to 1")),
    ],
)
def test_records_that_make_no_schedule_are_found(records: list[StepRecord], parts: tuple[str, str]) -> None:
    ((place, found, expected),) = wrong_with(records, 1, 1)
    assert place == len(records) - 1
    assert parts[0] in found
    assert parts[1] in expected


def test_a_schedule_is_as_it_should_be() -> None:
    assert not list(wrong_with([step(1), step(2), step(3, group(5, version=2))], 1, 1))

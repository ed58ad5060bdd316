"""What is recorded of samples and steps, and how it is read again."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.run.rollout.episode import Completion, CompletionRequest, Episode
from rlcore.run.rollout.episode_group import EpisodeGroup
from rlcore.run.rollout.rollout_trace import (
    GroupRecord,
    LostRecord,
    RolloutTrace,
    SampleRecord,
    StepRecord,
    differing,
    sample_record,
    wrong_with,
)
from rlcore.schema.structure import structure
from rlcore.spi import FinishReason, SamplingParams

PROMPT = np.array([1, 2], np.int32)


def said(*versions: int, reason: FinishReason = FinishReason.STOP) -> Completion:
    number = len(versions)
    wanted = CompletionRequest(prompt=PROMPT, seed=0, max_tokens=10, sampling=SamplingParams(), owner=None)
    return Completion(
        wanted=wanted,
        text="",
        tokens=np.arange(number, dtype=np.int32),
        logprobs=np.zeros(number, np.float32),
        weight_versions=np.array(versions, np.int32),
        finish_reason=reason,
    )


def episode() -> Episode:
    made = Episode(number=0, state=None, budget=100)
    made.read(PROMPT)
    return made


def test_spans_end_where_weights_change_and_where_the_generator_was_stopped() -> None:
    made = episode()
    made.begin_turn(said(3, 3))
    made.begin_turn(said(3))
    made.say(said(4, 4), "")
    made.go_on(PROMPT)
    made.say(said(5), "")
    record = sample_record(made, "")
    assert record.turns == (((3, 2), (3, 1), (4, 2)), ((5, 1),))
    assert (record.in_flight, record.lost) == (False, None)


def test_weights_that_change_without_a_stop_are_in_flight() -> None:
    made = episode()
    made.begin_turn(said(3, 4))
    made.say(said(5), "")
    record = sample_record(made, "")
    assert record.turns == (((3, 1), (4, 1), (5, 1)),)
    assert record.in_flight


def test_a_sample_that_is_lost_in_a_turn_keeps_what_it_said() -> None:
    made = episode()
    made.say(said(3), "")
    made.go_on(PROMPT)
    made.begin_turn(said(4, 4))
    made.valid, made.timed_out = False, True
    assert sample_record(made, "too long").lost == LostRecord(reason="too long", length=7, timed_out=True, in_turn=True)
    assert sample_record(made, "too long").turns == (((3, 1),), ((4, 2),))


def test_other_tokens_have_another_digest() -> None:
    one, other = episode(), episode()
    one.say(said(3, 3), "")
    other.say(said(3, 3), "")
    assert sample_record(one, "").digest == sample_record(other, "").digest
    other.go_on(PROMPT)
    assert sample_record(one, "").digest != sample_record(other, "").digest


def test_a_group_whose_environment_could_not_begin_is_known_by_its_samples() -> None:
    group = EpisodeGroup(number=2)
    group.begin(PROMPT, None, 1, 10)
    (made,) = group.episodes
    made.valid = False
    record = GroupRecord(number=2, began=0, samples=(sample_record(made, "broken"),))
    assert record.failed == "broken"


counts = st.integers(0, 50)
samples = st.builds(
    SampleRecord,
    turns=st.lists(st.lists(st.tuples(counts, st.integers(1, 9)), max_size=3).map(tuple), max_size=3).map(tuple),
    digest=st.text(st.sampled_from("0123456789abcdef"), max_size=16),
    in_flight=st.booleans(),
    lost=st.none() | st.builds(LostRecord, reason=st.text(), length=counts, timed_out=st.booleans(), in_turn=st.booleans()),
)
groups = st.builds(
    GroupRecord,
    number=counts,
    began=counts,
    samples=st.lists(samples, max_size=2).map(tuple),
    spare=st.none() | counts,
    num_long=counts,
    left_out=st.booleans(),
)
several = st.lists(counts, max_size=3).map(tuple)
steps = st.builds(
    StepRecord,
    step=st.integers(1, 9),
    version=counts,
    groups=st.lists(groups, max_size=2).map(tuple),
    next=counts,
    num_open=counts,
    num_rescored=counts,
    dropped=several,
    refilled=several,
)


@given(record=steps)
def test_a_record_is_read_as_it_was_written(record: StepRecord) -> None:
    assert structure(json.loads(json.dumps(record.as_json())), StepRecord, "line 1") == (record, [])


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

"""What is recorded of samples and steps, and how it is read again."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore.schema.structure import structure
from rlcore.spi import FinishReason, SamplingParams
from rlcore_rollout.episode import Completion, CompletionRequest, Episode
from rlcore_rollout.episode_group import EpisodeGroup
from rlcore_rollout.trace_records import (
    GroupRecord,
    LostRecord,
    SampleRecord,
    StepRecord,
    sample_record,
)

PROMPT = np.array([1, 2], np.int32)


def said(*versions: int, reason: FinishReason = FinishReason.STOP) -> Completion:
    number = len(versions)
    wanted = CompletionRequest(prompt=PROMPT, seed=0, max_tokens=10, sampling=SamplingParams(), owner=None)
    return Completion(
        request=wanted,
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
    made.add_partial_turn(said(3, 3))
    made.add_partial_turn(said(3))
    made.add_turn(said(4, 4), "")
    made.next_turn(PROMPT)
    made.add_turn(said(5), "")
    record = sample_record(made, "")
    assert record.turns == (((3, 2), (3, 1), (4, 2)), ((5, 1),))
    assert (record.in_flight, record.lost) == (False, None)


def test_weights_that_change_without_a_stop_are_in_flight() -> None:
    made = episode()
    made.add_partial_turn(said(3, 4))
    made.add_turn(said(5), "")
    record = sample_record(made, "")
    assert record.turns == (((3, 1), (4, 1), (5, 1)),)
    assert record.in_flight


def test_a_sample_that_is_lost_in_a_turn_keeps_what_it_said() -> None:
    made = episode()
    made.add_turn(said(3), "")
    made.next_turn(PROMPT)
    made.add_partial_turn(said(4, 4))
    made.valid, made.timed_out = False, True
    assert sample_record(made, "too long").lost == LostRecord(reason="too long", length=7, timed_out=True, in_turn=True)
    assert sample_record(made, "too long").turns == (((3, 1),), ((4, 2),))


def test_other_tokens_have_another_digest() -> None:
    one, other = episode(), episode()
    one.add_turn(said(3, 3), "")
    other.add_turn(said(3, 3), "")
    assert sample_record(one, "").digest == sample_record(other, "").digest
    other.next_turn(PROMPT)
    assert sample_record(one, "").digest != sample_record(other, "").digest


def test_a_group_whose_environment_could_not_begin_is_known_by_its_samples() -> None:
    group = EpisodeGroup(number=2)
    group.begin(PROMPT, None, 1, 10)
    (made,) = group.episodes
    made.valid = False
    record = GroupRecord(number=2, began=0, samples=(sample_record(made, "broken"),))
    assert record.failed is not None
    assert record.failed.reason == "broken"


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

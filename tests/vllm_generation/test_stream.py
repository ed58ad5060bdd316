"""A stream's requests on several engines: what is dealt to which, what is handed on, and how it ends."""

from concurrent.futures import Future

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import ContractError, FinishReason, WorkerError
from rlcore_torchkit.generation import FinishedSample
from rlcore_vllm.replicas.stream import Stream

from .conftest import request_of


class HeldReplica:
    """Keeps its calls until the test ends them."""

    def __init__(self):
        self.calls = []

    def generate(self, samples, deliver, on_tokens=None):
        done = Future()
        self.calls.append((samples, deliver, done))
        return done

    def cut(self, calls, number=None):
        for samples, deliver, done in self.calls:
            if done in calls:
                deliver(finished(samples.numbers.tolist(), FinishReason.ABORTED))
                done.set_result(None)

    def end(self, call, numbers=None):
        samples, deliver, done = self.calls[call]
        deliver(finished(samples.numbers.tolist() if numbers is None else numbers))
        if numbers is None:
            done.set_result(None)


class KeptFeed:
    def __init__(self):
        self.delivered, self.has_ended = [], False

    def deliver(self, samples, result):
        self.delivered.append((samples.tolist(), result.tokens.tolist(), result.finish_reasons.tolist()))

    def end(self):
        self.has_ended = True


def finished(numbers, reason=FinishReason.LENGTH, **changes):
    """Samples of one token, which is their number in the request."""
    return [
        FinishedSample(
            number=number,
            tokens=np.array([number], np.int32),
            logprobs=np.zeros(1, np.float32),
            weight_versions=np.zeros(1, np.int32),
            finish_reason=reason,
            **changes,
        )
        for number in reversed(numbers)
    ]


@pytest.fixture
def make_stream():
    def make(num_replicas):
        replicas, feed = [HeldReplica() for _ in range(num_replicas)], KeptFeed()
        return replicas, feed, Stream(replicas, feed)

    return make


def add(stream, request):
    stream.add(request, request.max_tokens.astype(np.int64))


def test_samples_are_numbered_through_the_stream(make_stream):
    (replica,), feed, stream = make_stream(1)
    add(stream, request_of([3, 2], 2))
    add(stream, request_of([], 2))
    add(stream, request_of([5], 3))
    assert [len(samples.numbers) for samples, _, _ in replica.calls] == [4, 3]
    replica.end(1, [2, 0])
    replica.end(0)
    assert feed.delivered == [
        ([4, 6], [0, 2], [FinishReason.LENGTH] * 2),
        ([0, 1, 2, 3], [0, 1, 2, 3], [FinishReason.LENGTH] * 4),
    ]


def test_the_engine_with_the_least_to_do_gets_the_next_request(make_stream):
    (first, second), _, stream = make_stream(2)
    add(stream, request_of([9], 1, 50))
    assert [len(replica.calls) for replica in (first, second)] == [1, 0]
    add(stream, request_of([9], 1, 20))
    add(stream, request_of([9], 1, 10))
    assert [len(replica.calls) for replica in (first, second)] == [1, 2]
    first.end(0)
    add(stream, request_of([9], 1, 20))
    assert [len(replica.calls) for replica in (first, second)] == [2, 2]


def test_a_cut_delivers_what_is_under_way_and_forgets_it(make_stream):
    (first, _), feed, stream = make_stream(2)
    add(stream, request_of([3] * 4, 1))
    add(stream, request_of([3] * 4, 1))
    first.end(0)
    stream.cut()
    delivered = {number: reasons[0] for numbers, _, reasons in feed.delivered for number in numbers}
    whole = set(first.calls[0][0].numbers.tolist())
    assert delivered == {n: FinishReason.LENGTH if n in whole else FinishReason.ABORTED for n in range(8)}
    assert stream.calls == {}
    assert not feed.has_ended


def test_an_engine_that_fails_ends_the_stream(make_stream):
    """The others' samples are delivered, as far as they are."""
    (first, second), feed, stream = make_stream(2)
    add(stream, request_of([3] * 4, 1))
    (_, _, done), failed = second.calls[0], WorkerError("killed")
    done.set_exception(failed)
    assert feed.has_ended
    with pytest.raises(WorkerError, match="killed"):
        stream.cut()
    assert [numbers for numbers, _, _ in feed.delivered] == [sorted(first.calls[0][0].numbers.tolist())]
    assert stream.calls == {done: 1}


def test_a_kernel_that_hides_its_choice_ends_the_stream(make_stream):
    """In the thread of the stream: what an engine's thread raised would be lost."""
    (replica,), feed, stream = make_stream(1)
    request = evolve(request_of([3], 1), routed_experts=True)
    add(stream, request)
    _, deliver, done = replica.calls[0]
    deliver(finished([0], routed_experts=np.full((4, 2, 2), -1, np.int16)))
    done.set_result(None)
    assert feed.has_ended
    assert feed.delivered == []
    with pytest.raises(ContractError, match="moe_backend"):
        stream.cut()


def test_a_conversation_goes_on_with_the_engine_that_has_its_beginning(make_stream):
    replicas, _, stream = make_stream(2)
    engines = {5: set(), 6: set()}
    for talks in ([5, 6], [6], [5], [6, 5]):
        add(stream, evolve(request_of([4] * len(talks), 1), conversations=np.array(talks)))
        for engine, replica in enumerate(replicas):
            for call, (samples, _, _) in enumerate(replica.calls):
                for number in samples.numbers.tolist():
                    engines[talks[number]].add(engine)
                replica.end(call)
            replica.calls = []
    assert sorted(engines.values()) == [{0}, {1}]


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit("planted")], ids=["Exception", "SystemExit"])
def test_an_error_of_the_feed_ends_the_stream_and_no_engines_thread(make_stream, error):
    (replica,), feed, stream = make_stream(1)

    def fail(*_):
        raise error

    feed.deliver = fail
    add(stream, request_of([3], 1))
    replica.end(0)
    assert feed.has_ended
    with pytest.raises(type(error), match="planted"):
        stream.cut()

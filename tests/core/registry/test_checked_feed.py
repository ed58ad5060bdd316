"""A stream's feed, checked on both sides: what is wrong ends the stream, and is raised where the stream was started."""

import threading

import numpy as np
import pytest

from rlcore.registry.sample_checks import CheckedFeed
from rlcore.spi import (
    ContractError,
    DataError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    RaggedTokens,
    SamplingParams,
    SetResidencyRequest,
    StreamRequest,
    StreamResult,
    WorkerError,
    capabilities,
)

from .test_generator_handle import refit_request


def request_of(*max_tokens, version=0, **changes):
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([[1, 2]] * len(max_tokens)),
        num_samples=1,
        seeds=np.arange(len(max_tokens)),
        max_tokens=np.array(max_tokens, np.int32),
        sampling=SamplingParams(**changes),
        weight_version=version,
    )


def result_of(*lengths, reason=FinishReason.LENGTH, version=0):
    total = sum(lengths)
    return GenerateResult(
        tokens=np.full(total, 5, np.int32),
        offsets=np.cumsum([0, *lengths]),
        logprobs=np.full(total, -0.5, np.float32),
        weight_versions=np.full(total, version, np.int32),
        finish_reasons=np.full(len(lengths), reason, np.uint8),
    )


class ListFeed:
    """Gives each of some lists of requests, then None; keeps what is delivered."""

    def __init__(self, *batches):
        self.batches = list(batches)
        self.delivered = []
        self.has_ended = False

    def take(self, *, wait):
        return self.batches.pop(0) if self.batches and not self.has_ended else None

    def deliver(self, samples, result):
        self.delivered.append((samples.tolist(), np.diff(result.offsets).tolist()))

    def end(self):
        self.has_ended = True


@pytest.fixture
def make_feed():
    """A feed whose checks let everything pass, unless given."""

    def make(*batches, require=lambda request: None, check=lambda expected, result: None):
        inner = ListFeed(*batches)
        return inner, CheckedFeed(inner, require, check)

    return make


def drained(feed):
    while feed.take(wait=True) is not None:
        pass


def test_samples_are_numbered_through_the_stream_and_checked_by_their_request(make_feed):
    seen = []

    def check(expected, result):
        seen.append((expected.max_tokens.tolist(), expected.sampling.temperature))

    inner, feed = make_feed([request_of(1, 2)], [request_of(3, 4, 5, temperature=0.5)], check=check)
    drained(feed)
    feed.deliver(np.array([3, 4]), result_of(4, 5))
    feed.deliver(np.array([1]), result_of(2))
    feed.deliver(np.array([2]), result_of(3))
    feed.deliver(np.array([0]), result_of(1))
    feed.finish()
    assert inner.delivered == [([3, 4], [4, 5]), ([1], [2]), ([2], [3]), ([0], [1])]
    assert seen == [([4, 5], 0.5), ([2], 1.0), ([3], 0.5), ([1], 1.0)]


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([], "no samples"),
        ([5], r"found samples \[5\]; expected those of one request"),
        ([-1], r"found samples \[-1\]"),
        ([1, 2], r"found samples \[1, 2\]; expected those of one request"),
        ([0, 0], r"found samples \[0, 0\], one of them for the second time"),
    ],
)
def test_samples_that_nobody_asked_for_end_the_stream(samples, text, make_feed):
    inner, feed = make_feed([request_of(1, 1), request_of(1, 1, 1)])
    feed.take(wait=True)
    feed.deliver(np.array(samples, np.int64), result_of(*[1] * len(samples)))
    assert inner.has_ended
    assert inner.delivered == []
    assert feed.take(wait=True) is None
    with pytest.raises(ContractError, match=text):
        feed.finish()


def test_a_sample_that_comes_again_ends_the_stream(make_feed):
    inner, feed = make_feed([request_of(1, 1)])
    feed.take(wait=True)
    feed.deliver(np.array([1]), result_of(1))
    feed.deliver(np.array([1]), result_of(1))
    assert inner.delivered == [([1], [1])]
    with pytest.raises(ContractError, match="for the second time"):
        feed.finish()


def test_samples_that_are_not_what_they_were_to_be_end_the_stream(make_feed):
    def check(expected, result):
        raise ContractError("tokens: found too many")

    inner, feed = make_feed([request_of(1)], check=check)
    feed.take(wait=True)
    feed.deliver(np.array([0]), result_of(1))
    assert inner.delivered == []
    with pytest.raises(ContractError, match="tokens: found too many"):
        feed.finish()


def test_a_prompt_that_is_at_fault_is_told_as_such(make_feed):
    def require(request):
        raise DataError("found the token 8 in a prompt")

    _, feed = make_feed([request_of(1)], require=require)
    assert feed.take(wait=True) is None
    with pytest.raises(DataError, match="found the token 8"):
        feed.finish()


def test_a_request_that_is_not_legal_reaches_no_generator(make_feed):
    def require(request):
        raise ContractError("needs top_k")

    inner, feed = make_feed([request_of(1)], require=require)
    assert feed.take(wait=True) is None
    assert inner.has_ended
    with pytest.raises(ContractError, match="needs top_k"):
        feed.finish()


@pytest.mark.parametrize(
    ("ends", "delivered", "text"),
    [(False, [0, 1], "returned before the feed had ended"), (True, [1], "returned without sample 0, one of 1 never delivered")],
)
def test_a_generator_that_returns_early_is_told(ends, delivered, text, make_feed):
    _, feed = make_feed([request_of(1, 1)])
    feed.take(wait=True)
    if ends:
        assert feed.take(wait=True) is None
    for sample in delivered:
        feed.deliver(np.array([sample]), result_of(1))
    with pytest.raises(ContractError, match=text):
        feed.finish()


def test_a_feed_that_raises_ends_the_stream_and_no_engines_thread(make_feed):
    inner, feed = make_feed([request_of(1)])
    inner.deliver = None
    feed.take(wait=True)
    feed.deliver(np.array([0]), result_of(1))
    assert inner.has_ended
    with pytest.raises(TypeError):
        feed.finish()


def test_nothing_passes_a_feed_that_is_closed(make_feed):
    """An engine that was given up delivers late, when the feed may serve another stream with the same numbers."""
    inner, feed = make_feed([request_of(1, 1)])
    feed.take(wait=True)
    feed.deliver(np.array([0]), result_of(1))
    feed.close()
    feed.deliver(np.array([1]), result_of(1))
    feed.deliver(np.array([7]), result_of(1))
    feed.end()
    assert inner.delivered == [([0], [1])]
    assert not inner.has_ended


def test_a_feed_is_closed_once_nothing_is_being_delivered(make_feed):
    inner, feed = make_feed([request_of(1)])
    feed.take(wait=True)
    delivering, go_on, events = threading.Event(), threading.Event(), []

    def deliver(samples, result):
        delivering.set()
        assert go_on.wait(300)
        events.append("delivered")

    inner.deliver = deliver
    deliverer = threading.Thread(target=feed.deliver, args=(np.array([0]), result_of(1)))
    closer = threading.Thread(target=lambda: (feed.close(), events.append("closed")))
    deliverer.start()
    assert delivering.wait(300)
    closer.start()
    go_on.set()
    for thread in (deliverer, closer):
        thread.join(300)
    assert events == ["delivered", "closed"]


def test_many_threads_deliver(make_feed):
    inner, feed = make_feed([request_of(*[1] * 400)])
    drained(feed)

    def deliver(first):
        for sample in range(first, 400, 4):
            feed.deliver(np.array([sample]), result_of(1))

    threads = [threading.Thread(target=deliver, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    feed.finish()
    assert sorted(sample for (sample,), _ in inner.delivered) == list(range(400))


def answering(self, request):
    """A generator that answers each request as soon as it has taken it."""
    number = 0
    while (taken := request.feed.take(wait=True)) is not None:
        for one in taken:
            request.feed.deliver(number + np.arange(len(one.seeds)), result_of(*one.max_tokens.tolist(), version=3))
            number += len(one.seeds)
    return StreamResult()


@pytest.fixture
def make_streaming(make_generator):
    """A generator at version 3, which streams by a given function."""

    def make(stream=answering, **options):
        generator = make_generator(stream=stream, **options)
        generator.refit(refit_request())
        return generator

    return make


def test_a_stream_generates_what_its_feed_brings(make_streaming):
    feed = ListFeed([request_of(2, 3, version=3)], [request_of(1, version=2)])
    make_streaming().stream(StreamRequest(feed=feed, weight_version=3))
    assert feed.delivered == [([0, 1], [2, 3]), ([2], [1])]


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (request_of(1, version=4), "weight version 4; expected None and at most 3"),
        (request_of(1, version=3, top_k=2), "this stream needs the capability 'top_k'"),
    ],
)
def test_what_a_generator_cannot_do_is_refused_in_a_stream_too(request_, text, make_streaming):
    declared = {capabilities.CONTINUOUS, "refit.in_process"}
    generator = make_streaming(declared=declared)
    with pytest.raises(ContractError, match=text):
        generator.stream(StreamRequest(feed=ListFeed([request_]), weight_version=3))


@pytest.mark.parametrize(
    ("version", "declared", "text"),
    [
        (2, capabilities.KNOWN, "stream at weight version 2; it holds 3"),
        (3, {"refit.in_process"}, "this stream needs the capability 'continuous'"),
    ],
)
def test_a_stream_has_its_conditions(version, declared, text, make_streaming):
    with pytest.raises(ContractError, match=text):
        make_streaming(declared=declared).stream(StreamRequest(feed=ListFeed(), weight_version=version))


def test_a_worker_that_dies_in_a_stream_leaves_no_weights(make_streaming):
    def dying(self, request):
        raise WorkerError("killed")

    generator = make_streaming(dying)
    with pytest.raises(WorkerError):
        generator.stream(StreamRequest(feed=ListFeed(), weight_version=3))
    assert generator.weight_version is None


def test_a_stream_that_failed_delivers_nothing_any_more(make_streaming):
    """What its engines still have belongs to nobody."""
    feeds = []

    def failing(self, request):
        feeds.append(request.feed)
        request.feed.take(wait=True)
        raise WorkerError("killed")

    feed = ListFeed([request_of(1, version=3)])
    with pytest.raises(WorkerError):
        make_streaming(failing).stream(StreamRequest(feed=feed, weight_version=3))
    feeds[0].deliver(np.array([0]), result_of(1, version=3))
    feeds[0].end()
    assert feed.delivered == []
    assert not feed.has_ended


def test_nothing_is_moved_while_a_stream_runs(make_streaming):
    moved = []

    def moving(self, request):
        with pytest.raises(ContractError, match="set_residency while it generates"):
            generator.set_residency(SetResidencyRequest(weights="host", state="host"))
        moved.append(True)
        return answering(self, request)

    generator = make_streaming(moving)
    generator.stream(StreamRequest(feed=ListFeed(), weight_version=3))
    assert moved
    generator.set_residency(SetResidencyRequest(weights="host", state="host"))


def test_a_generator_that_leaves_it_out_cannot_stream(make_generator):
    generator = make_generator()
    generator.refit(refit_request())
    with pytest.raises(ContractError, match="does not implement it"):
        generator.stream(StreamRequest(feed=ListFeed(), weight_version=3))


@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit("planted"), RecursionError("planted")], ids=repr)
@pytest.mark.parametrize("place", ["take", "deliver", "check"])
def test_whatever_is_raised_around_a_feed_is_what_the_stream_ends_with(error, place, make_feed):
    def fail(*_, **__):
        raise error

    inner, feed = make_feed([request_of(1)], check=fail if place == "check" else lambda expected, result: None)
    if place == "take":
        inner.take = fail
        with pytest.raises(type(error), match="planted"):
            feed.take(wait=True)
    else:
        feed.take(wait=True)
        if place == "deliver":
            inner.deliver = fail
        feed.deliver(np.array([0]), result_of(1))
    with pytest.raises(type(error), match="planted"):
        feed.finish()

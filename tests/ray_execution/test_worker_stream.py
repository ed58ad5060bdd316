"""A worker's stream, fed and emptied as the driver does."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, RaggedTokens, RoutedExperts, SamplingParams
from rlcore.spi.arrays import offsets_of
from rlcore.spi.execution import ResponseFeed, Responses
from rlcore_ray import worker_stream
from rlcore_ray.worker_stream import Collected, WorkerStream


def request_of(num_samples: int, *, routed: bool = False) -> GenerateRequest:
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([[1]]),
        num_samples=num_samples,
        seeds=np.arange(num_samples),
        max_tokens=np.full(num_samples, 3, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
        routed_experts=routed,
    )


def responses_of(samples: list[int], *, routed: bool = False) -> Responses:
    """Samples of as many tokens as their numbers say, which they consist of."""
    lengths = np.array(samples) + 1
    num_tokens = int(lengths.sum())
    rows = lengths + 1
    result = GenerateResult(
        tokens=np.repeat(np.array(samples, np.int32), lengths),
        offsets=offsets_of(lengths),
        logprobs=np.zeros(num_tokens, np.float32),
        weight_versions=np.zeros(num_tokens, np.int32),
        finish_reasons=np.full(len(samples), FinishReason.LENGTH, np.uint8),
        routed_experts=RoutedExperts(
            experts=np.repeat(np.array(samples, np.int16), rows)[:, None, None], offsets=offsets_of(rows)
        )
        if routed
        else None,
    )
    return Responses(result=result, texts=[f"text {sample}" for sample in samples])


def until_ended(stream: WorkerStream) -> list[Collected]:
    collected = [stream.collect()]
    while not collected[-1].has_ended:
        collected.append(stream.collect())
    return collected


def begun(generate: Callable[[ResponseFeed], None]) -> WorkerStream:
    return WorkerStream(lambda feed, _: generate(feed), 0)


def test_samples_come_back_under_the_drivers_numbers_many_in_one_answer() -> None:
    taken = threading.Event()

    def generate(feed: ResponseFeed) -> None:
        num_taken = 0
        while num_taken < 4:
            num_taken += sum(len(request.seeds) for request in feed.take(wait=True) or ())
        taken.set()
        assert feed.take(wait=True) is None
        for sample in (3, 0, 2, 1):
            feed.deliver(np.array([sample]), responses_of([sample]))

    stream = begun(generate)
    stream.add([(np.array([7, 8]), request_of(2))])
    stream.add([(np.array([5, 20]), request_of(2))])
    taken.wait()
    stream.end()
    stream.join()
    assert stream.thread is None
    (collected,) = until_ended(stream)
    ((numbers, responses),) = collected.parts
    assert numbers.tolist() == [5, 7, 8, 20]
    assert responses.texts == ["text 2", "text 0", "text 1", "text 3"]
    assert responses.result.tokens.tolist() == [2] * 3 + [0] + [1] * 2 + [3] * 4
    assert responses.result.offsets.tolist() == [0, 3, 4, 6, 10]


def test_what_the_generator_never_took_comes_back_apart_from_samples_with_experts() -> None:
    taken = threading.Event()

    def generate(feed: ResponseFeed) -> None:
        feed.take(wait=True)
        taken.set()
        feed.take(wait=True)
        feed.deliver(np.array([0]), responses_of([0], routed=True))
        feed.deliver(np.array([1]), responses_of([1], routed=True))

    stream = begun(generate)
    stream.add([(np.array([4, 2]), request_of(2, routed=True))])
    taken.wait()
    stream.end()
    stream.add([(np.array([9]), request_of(1, routed=True))])
    stream.join()
    (collected,) = until_ended(stream)
    (reporting, responses), (others, not_begun) = collected.parts
    assert (reporting.tolist(), others.tolist()) == ([2, 4], [9])
    routed = responses.result.routed_experts
    assert routed is not None
    assert routed.experts.reshape(-1).tolist() == [1] * 3 + [0] * 2
    assert not_begun.result.finish_reasons.tolist() == [FinishReason.ABORTED]


def test_what_the_generator_raised_is_raised_after_what_it_had_handed_out() -> None:
    def generate(feed: ResponseFeed) -> None:
        feed.take(wait=True)
        feed.deliver(np.array([1]), responses_of([1]))
        raise ZeroDivisionError("a defect on purpose")

    stream = begun(generate)
    stream.add([(np.array([3, 4]), request_of(2))])
    stream.join()
    collected = stream.collect()
    assert not collected.has_ended
    assert [numbers.tolist() for numbers, _ in collected.parts] == [[4]]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            stream.collect()


def test_nothing_comes_back_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_stream, "COLLECT_S", 0.0)

    def generate(feed: ResponseFeed) -> None:
        while feed.take(wait=True) is not None:
            pass

    stream = begun(generate)
    collected = stream.collect()
    assert (list(collected.parts), collected.has_ended) == ([], False)
    assert stream.thread is not None
    stream.end()
    stream.join()
    assert stream.collect().has_ended


def test_it_has_begun_once_the_generator_is_at_it() -> None:
    """A refit that is the next call finds a stream that began with the weights before."""
    is_at_it = threading.Event()

    def late(feed: ResponseFeed) -> None:
        time.sleep(0.05)
        is_at_it.set()
        while feed.take(wait=True) is not None:
            pass

    stream = begun(late)
    assert is_at_it.is_set()
    stream.end()
    stream.join()

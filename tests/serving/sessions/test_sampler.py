"""Samples of sessions: what streams cut off goes on in the next one, and what no one waits for is not generated."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, Responses, SamplingParams
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout.step_plans import seed_after
from rlcore_serve.sessions.interface import Sample, SampleRequest
from rlcore_serve.sessions.sampler import SessionSampler

TOKENIZER = FakeTokenizer()
PROMPT = np.array([1, 2, 3], np.int32)


@pytest.fixture
def sampler() -> SessionSampler:
    return SessionSampler(TOKENIZER.decode)


def request(**options: Any) -> SampleRequest:
    return SampleRequest(**{"prompt": PROMPT, "seed": 5, "max_tokens": 9, "sampling": SamplingParams(), **options})


def responses(text: str, version: int, reason: FinishReason) -> Responses:
    tokens = np.array(TOKENIZER.encode(text), np.int32)
    result = GenerateResult(
        tokens=tokens,
        offsets=np.array([0, len(tokens)]),
        logprobs=-tokens.astype(np.float32),
        weight_versions=np.full(len(tokens), version, np.int32),
        finish_reasons=np.array([reason], np.uint8),
    )
    return Responses.of(result, TOKENIZER)


async def stream(sampler: SessionSampler, text: str, version: int, reason: FinishReason) -> GenerateRequest:
    """What a stream takes, once something is there; it says so much of it."""
    sampler.requests.begin(version)
    while not (taken := sampler.requests.take(wait=False)):
        await asyncio.sleep(0)
    sampler.requests.deliver(np.zeros(1, np.int64), responses(text, version, reason))
    sampler.requests.end()
    return taken[0]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 300))


def sampled_in_parts(sampler: SessionSampler, wanted: SampleRequest, *parts: tuple[str, int, FinishReason]) -> Any:
    async def work() -> tuple[Sample, list[GenerateRequest]]:
        waiting = asyncio.create_task(sampler.sample(wanted))
        taken = [await stream(sampler, *part) for part in parts]
        return await waiting, taken

    return run(work())


def test_what_a_stream_cuts_off_goes_on_in_the_next_one(sampler: SessionSampler) -> None:
    cut = FinishReason.ABORTED
    parts = ("abc", 4, cut), ("", 5, cut), ("de", 5, cut), ("f", 6, FinishReason.STOP)
    sample, taken = sampled_in_parts(sampler, request(), *parts)
    assert (sample.text, sample.finish_reason) == ("abcdef", FinishReason.STOP)
    assert sample.weight_versions.tolist() == [4, 4, 4, 5, 5, 6]
    assert sample.tokens.tolist() == TOKENIZER.encode("abcdef")
    np.testing.assert_array_equal(sample.logprobs, -sample.tokens.astype(np.float32))
    said = [TOKENIZER.encode("abcde"[:length]) for length in (0, 3, 3, 5)]
    assert [one.prompts.tokens.tolist() for one in taken] == [[*PROMPT.tolist(), *part] for part in said]
    assert [one.max_tokens.tolist() for one in taken] == [[9], [6], [6], [4]]
    assert [one.seeds.tolist() for one in taken] == [[seed_after(5, len(part))] for part in said]
    assert sampler.count.busy_s() == 0.0
    assert sampler.requests.num_outstanding == 0


def test_a_sample_with_a_schema_begins_again_where_it_was_cut(sampler: SessionSampler) -> None:
    """A schema begins with its sample, so that a part of one cannot go on."""
    wanted = request(sampling=SamplingParams(json_schema="{}"))
    parts = ("abc", 1, FinishReason.ABORTED), ("def", 2, FinishReason.STOP)
    sample, taken = sampled_in_parts(sampler, wanted, *parts)
    assert (sample.text, sample.weight_versions.tolist()) == ("def", [2, 2, 2])
    assert [one.prompts.tokens.tolist() for one in taken] == [PROMPT.tolist()] * 2
    read = evolve(wanted, on_tokens=lambda first, tokens, rows: None)
    assert sampled_in_parts(sampler, read, parts[0])[0] is None  # its client has read tokens that do not count any more


def test_a_stop_string_across_the_cut_ends_the_sample(sampler: SessionSampler) -> None:
    wanted = request(sampling=SamplingParams(stop_strings=("cd",)))
    parts = ("abc", 1, FinishReason.ABORTED), ("def", 2, FinishReason.LENGTH)
    sample, _ = sampled_in_parts(sampler, wanted, *parts)
    assert (sample.text, sample.finish_reason) == ("abcd", FinishReason.STOP)


def test_nothing_is_sampled_once_generation_has_ended(sampler: SessionSampler) -> None:
    async def ask() -> list[Any]:
        waiting = asyncio.create_task(sampler.sample(request()))
        await asyncio.sleep(0)
        sampler.close()
        refused = await asyncio.gather(waiting, sampler.sample(request()))
        sampler.open()
        again = asyncio.create_task(sampler.sample(request()))
        await asyncio.sleep(0)
        assert sampler.requests.num_outstanding == 1
        again.cancel()
        return refused

    assert run(ask()) == [None, None]
    assert sampler.requests.num_outstanding == 0


def test_what_no_one_waits_for_is_not_sampled(sampler: SessionSampler) -> None:
    async def ask() -> None:
        kept, given_up = (asyncio.create_task(sampler.sample(request())) for _ in range(2))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        assert sampler.requests.num_outstanding == 1
        assert not kept.done()
        kept.cancel()

    run(ask())
    assert sampler.requests.num_outstanding == 0


def test_a_session_that_is_given_up_waits_no_longer(sampler: SessionSampler) -> None:
    async def ask() -> None:
        given_up, kept = (asyncio.create_task(sampler.sample(request(conversation=number))) for number in (3, 4))
        await asyncio.sleep(0)
        sampler.give_up(3)
        assert await given_up is None
        assert sampler.requests.num_outstanding == 1
        assert not kept.done()
        kept.cancel()

    run(ask())


def test_samples_of_one_prompt_are_one_request(sampler: SessionSampler) -> None:
    async def work() -> list[GenerateRequest]:
        waiting = [asyncio.create_task(sampler.sample(request(seed=seed))) for seed in (5, 6, 7)]
        while sampler.requests.num_outstanding != len(waiting):
            await asyncio.sleep(0)
        sampler.requests.begin(4)
        taken = list(sampler.requests.take(wait=False) or ())
        for one in waiting:
            one.cancel()
        return taken

    (taken,) = run(work())
    assert (taken.num_samples, taken.prompts.tokens.tolist()) == (3, PROMPT.tolist())
    assert taken.seeds.tolist() == [5, 6, 7]

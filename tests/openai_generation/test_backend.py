"""The generator in front of endpoints that fail, that lack something, or that are slow."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from stub_endpoint import LIMIT, Stub, counted, listening, token

from rlcore.registry.binding import build_generator
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.spi import (
    ConfigError,
    FinishReason,
    GenerateRequest,
    GeneratorContext,
    ModelSpec,
    PluginError,
    RaggedTokens,
    RankInfo,
    SamplingParams,
    StreamRequest,
    WorkerError,
)
from rlcore_conformance.generators.feeds import ScriptedFeed
from rlcore_conformance.references.fixtures import entry_of
from rlcore_openai import backend, endpoint, endpoint_pool
from rlcore_openai.config import OpenAIConfig
from rlcore_openai.endpoints import Endpoints
from rlcore_openai.provider import PROVIDER

KEY = "sk-very-secret"
VOCAB_SIZE = 1000
Open = Callable[..., GeneratorHandle]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens the generator in front of stubs, and closes both; retries come at once."""
    monkeypatch.setattr(endpoint_pool, "FIRST_PAUSE_S", 1e-3)
    monkeypatch.setenv("STUB_KEY", KEY)
    monkeypatch.setattr(backend, "decoder_of", lambda model: partial(words, model.path))
    monkeypatch.setattr(backend, "vocab_size_of", lambda model: VOCAB_SIZE)
    with ExitStack() as stack:

        def open_with(*stubs: Stub, limit: int = LIMIT, letter: str = "t", **options: Any) -> GeneratorHandle:
            urls = tuple(stack.enter_context(listening(stub)) for stub in stubs)
            model = ModelSpec(path=letter)
            context = GeneratorContext(model=model, rank_info=RankInfo(), seed=0, max_sequence_length=limit, channel=None)
            config = OpenAIConfig(base_urls=urls, api_key_env="STUB_KEY", **options)
            handle = build_generator(entry_of("generator", PROVIDER, "cpu"), context, config)
            stack.callback(handle.close)
            return handle

        yield open_with


def words(letter: str, tokens: Sequence[int]) -> list[str]:
    """Texts of a tokenizer whose tokens are words of a letter and the token's number; without importing transformers."""
    return [" ".join(f"{letter}{number}" for number in tokens)]


def request(num_samples: int, **changes: Any) -> GenerateRequest:
    whole = GenerateRequest(
        prompts=RaggedTokens.from_lists([[7, 8]]),
        num_samples=num_samples,
        seeds=np.arange(100, 100 + num_samples),
        max_tokens=np.full(num_samples, 3, np.int32),
        sampling=SamplingParams(),
        weight_version=0,
    )
    return evolve(whole, **changes)


def unless(failures: list[Any]) -> Callable[[dict[str, Any]], Any]:
    """Answers as it should once it has failed in each of these ways, after the probe."""
    probed = []

    def answer(body: dict[str, Any]) -> Any:
        if not probed:
            probed.append(True)
            return counted(body)
        return failures.pop(0) if failures else counted(body)

    return answer


def test_what_is_asked_for(opened: Open) -> None:
    """Nothing is left to a server's defaults, and the key goes along with each request."""
    stub = Stub()
    sampling = SamplingParams(temperature=0.5, top_k=4, top_p=0.9, stop_token_ids=(3,), stop_strings=("#",))
    opened(stub).generate(request(1, sampling=sampling))
    expected = {"prompt": [7, 8], "seed": 100, "max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.0}
    expected |= {"stop": ["#"], "stop_token_ids": [3], "ignore_eos": True, "repetition_penalty": 1.0, "model": "policy"}
    assert stub.asked[-1].items() >= expected.items()
    assert stub.keys == [f"Bearer {KEY}"] * 3, "the list of models, the probe, the sample"


@pytest.mark.parametrize(
    "failure",
    [
        {"status": 429, "headers": {"Retry-After": "0"}},
        {"status": 503},
        [token(100)],
        [token(100), {"error": {"message": "engine"}}],
    ],
    ids=["too many", "down", "broken off", "failed under way"],
)
def test_what_failed_is_asked_for_again_from_its_beginning(opened: Open, failure: Any) -> None:
    found = opened(Stub(answer=unless([failure]))).generate(request(1))
    assert found.tokens.tolist() == [100, 100, 100]
    assert found.finish_reasons.tolist() == [FinishReason.LENGTH]


def test_another_endpoint_answers_for_one_that_does_not(opened: Open) -> None:
    broken, whole = Stub(answer=unless([{"status": 500}] * 100)), Stub()
    found = opened(broken, whole).generate(request(8))
    assert found.tokens.tolist() == np.repeat(np.arange(100, 108), 3).tolist()
    assert len(broken.asked) > 1


def test_attempts_are_bounded(opened: Open) -> None:
    stub = Stub(answer=unless([{"status": 500, "text": f"no {KEY}"}] * 100))
    with pytest.raises(WorkerError, match="in 2 attempts") as caught:
        opened(stub, max_attempts=2).generate(request(1))
    assert "status 500: no ***" in str(caught.value)
    assert len(stub.asked) == 3


def test_a_request_that_is_refused_is_not_repeated(opened: Open) -> None:
    stub = Stub(answer=unless([{"status": 400, "text": "too long"}] * 100))
    with pytest.raises(PluginError, match="status 400: too long"):
        opened(stub).generate(request(1))
    assert len(stub.asked) == 2


def test_an_answer_has_a_time_limit(opened: Open) -> None:
    async def late() -> Any:
        await asyncio.sleep(60)

    answer = unless([late])
    stub = Stub(answer=lambda body: found() if callable(found := answer(body)) else found)
    assert opened(stub, timeout_s=1.0).generate(request(1)).tokens.tolist() == [100] * 3


def test_no_more_are_asked_for_at_once_than_there_are_places(opened: Open) -> None:
    """And as many: the first answers come once so many are asked for."""

    async def slow(body: dict[str, Any]) -> Any:
        while stub.most_at_once < 3 and len(stub.asked) > 1:  # the first is the probe
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        return counted(body)

    stub = Stub(answer=slow)
    opened(stub, max_concurrent=3).generate(request(12))
    assert stub.most_at_once == 3


def test_a_conversation_stays_where_it_began(opened: Open) -> None:
    stubs = Stub(), Stub()
    opened(*stubs).generate(request(6, conversations=np.array([4, 5, 4, 5, 4, 4])))
    assert [sorted(body["seed"] for body in stub.asked[1:]) for stub in stubs] == [[100, 102, 104, 105], [101, 103]]


def test_an_address_above_the_api_is_told_where_that_is() -> None:
    """The commonest slip: the server's own address, without /v1."""
    with listening(Stub()) as url, pytest.raises(ConfigError, match=url):
        Endpoints(OpenAIConfig(base_urls=(url.removesuffix("/v1"),)), LIMIT, lambda _: [""])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": None}, "return_token_ids"),
        ({"logprobs": None}, "log-probabilities"),
        ({"finish_reason": "tool_calls"}, "finish_reason 'tool_calls'"),
        ({"text": "", "token_ids": [], "logprobs": None}, "0 tokens"),
    ],
)
def test_what_an_endpoint_does_not_return_is_named_at_the_start(opened: Open, changes: dict[str, Any], named: str) -> None:
    stub = Stub(answer=lambda body: [token(1, reason="length", **changes)])
    with pytest.raises(ConfigError) as caught:
        opened(stub, Stub(models=[]), max_attempts=1)
    assert [problem.path for problem in caught.value.problems] == ["generator.openai.base_urls", "generator.openai.model"]
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": "other"}, "'other', where"),
        ({"limit": LIMIT + 1}, f"sequences of up to {LIMIT} tokens"),
    ],
)
def test_a_model_that_is_not_there_or_too_short_is_named(opened: Open, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        opened(Stub(), **options)


def test_another_tokenizer_is_refused(opened: Open) -> None:
    """Which would make prompts and answers of the run other texts there and here."""
    with pytest.raises(ConfigError, match="the text 't0 t0 .* are 'u0 u0 .*Set model.path"):
        opened(Stub(), letter="u")


def test_log_probabilities_of_another_distribution_are_refused(opened: Open) -> None:
    """vLLM tells the model's own by default, which are those of samples at temperature 1, and are wanted at temperature 0."""
    raw = Stub(answer=lambda body: counted(body | {"top_k": 0}))
    handle = opened(raw)
    for same in (SamplingParams(), SamplingParams(temperature=0.0, top_p=0.5)):
        handle.generate(request(1, sampling=same))
    for other in (SamplingParams(temperature=0.7), SamplingParams(top_k=2)):
        with pytest.raises(ConfigError, match="processed_logprobs"):
            handle.generate(request(1, sampling=other))


def test_a_stream_ends_with_what_a_sample_failed_with(opened: Open) -> None:
    stub = Stub(answer=unless([{"status": 400, "text": "no"}]))
    with pytest.raises(PluginError, match="status 400: no"):
        opened(stub).stream(StreamRequest(feed=ScriptedFeed(first=[request(4)]), weight_version=0))


DEEP = '{"choices": ' + "[" * 100_000 + "]" * 100_000 + "}"
WRONG: dict[str, tuple[Any, str]] = {
    "NaN": (token(1, float("nan")), "log-probability nan"),
    "an infinite one": (token(1, -float("inf")), "log-probability -inf"),
    "above 0": (token(1, 0.5), "log-probability 0.5"),
    "null": (token(1, None), "log-probability None"),  # type: ignore[arg-type]
    "a text for one": (token(1, "-0.5"), "log-probability '-0.5'"),  # type: ignore[arg-type]
    "beyond the vocabulary": (token(VOCAB_SIZE), f"token id {VOCAB_SIZE}"),
    "beyond 32 bits": (token(2**40), f"token id {2**40}"),
    "below 0": (token(-1), "token id -1"),
    "a text for an id": (token("1"), "token id '1'"),  # type: ignore[arg-type]
    "a fraction for an id": (token(1.5), "token id 1.5"),  # type: ignore[arg-type]
    "null for an id": (token(1, token_ids=[None]), "token id None"),
    "a table of ids": (token(1, token_ids={"1": 2}), "no list"),
    "a table of log-probabilities": (token(1, logprobs={"token_logprobs": {"1": -0.5}}), "no list"),
    "a list for logprobs": (token(1, logprobs=[-0.5]), "another form"),
    "a list for a text": (token(1, text=["t1"]), "another form"),
    "a list for a reason": (token(1, finish_reason=["stop"]), "another form"),
    "too many tokens": (token(1, token_ids=[1] * 9, logprobs={"token_logprobs": [-0.5] * 9}), "more than 3 tokens"),
    "a list for an event": ([1], "another form"),
    "a number for an event": (7, "another form"),
    "null for choices": ({"choices": None}, "another form"),
    "a text for a choice": ({"choices": ["t1"]}, "another form"),
    "another choice": (token(1, index=1), "a choice with the index 1"),
    "more log-probabilities": (token(1, logprobs={"token_logprobs": [-0.5] * 2}), "2 log-probabilities of 1 token ids"),
    "no tokens": (token(1, reason="stop", text="", token_ids=[], logprobs=None), "an answer without tokens"),
    "an end before the length": (token(1, reason="length"), "1 tokens and the finish_reason length, asked for 3"),
    "deep JSON": (DEEP, "another form (RecursionError"),
    "no JSON": ("{", "another form (JSONDecodeError"),
}


@pytest.mark.parametrize("how", ["stream", "generate"])
@pytest.mark.parametrize("what", WRONG)
def test_an_answer_that_is_none_is_named(opened: Open, what: str, how: str) -> None:
    event, named = WRONG[what]
    handle = opened(Stub(answer=unless([[event]])))
    with pytest.raises(PluginError) as raised:
        if how == "generate":
            handle.generate(request(1))
        else:
            handle.stream(StreamRequest(feed=ScriptedFeed(first=[request(1)], then=lambda: None), weight_version=0))
    assert named in str(raised.value)
    assert "http://127.0.0.1" in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ([["1" * 4096]], "an event of more than 2,000 bytes"),
        ({"status": 400, "text": "long " * 1000}, "status 400: long long"),
        ({"status": 500, "text": "long " * 1000}, "status 500: long long"),
    ],
    ids=["event", "refusal", "failure"],
)
def test_an_answer_is_read_as_far_as_it_may_be_long(
    opened: Open, monkeypatch: pytest.MonkeyPatch, answer: Any, named: str
) -> None:
    monkeypatch.setattr(endpoint, "MAX_EVENT_BYTES", 2000)
    monkeypatch.setattr(endpoint, "READ", 2000)
    with pytest.raises((PluginError, WorkerError), match=named):
        opened(Stub(answer=unless([answer])), max_attempts=1).generate(request(1))


@pytest.mark.parametrize("models", [[1], ["policy"], None, {"id": 1}, 7], ids=str)
def test_a_list_of_models_that_is_none_is_named(opened: Open, models: Any) -> None:
    with pytest.raises(ConfigError, match="base_urls|model"):
        opened(Stub(models=models), max_attempts=1)


def long_text(body: dict[str, Any]) -> list[Any]:
    return [{"choices": [event["choices"][0] | {"text": "z" * 100_000}]} for event in counted(body)]


@pytest.mark.parametrize(
    "stub",
    [
        Stub(models=[{"id": f"m{number}"} for number in range(10_000)]),
        Stub(models=[{"id": "m" * 100_000}, {"id": "n"}]),
        Stub(answer=long_text),
        Stub(answer=lambda body: [token(1, reason="x" * 100_000)]),
        Stub(answer=lambda body: [{"error": "e" * 100_000}]),
    ],
    ids=["models", "name", "text", "reason", "error"],
)
def test_a_message_shows_the_beginning_of_what_an_endpoint_says(opened: Open, stub: Stub) -> None:
    with pytest.raises(ConfigError) as raised:
        opened(stub, max_attempts=1)
    assert len(str(raised.value)) < 2000


@pytest.mark.parametrize("how", ["stream", "generate"])
@pytest.mark.parametrize("error", [ValueError("planted"), SystemExit(3), asyncio.CancelledError("planted")], ids=repr)
def test_an_error_behind_an_answer_ends_the_call_with_it(
    opened: Open, monkeypatch: pytest.MonkeyPatch, error: BaseException, how: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    handle = opened(Stub())
    monkeypatch.setattr(backend, "result_of", fail)
    with pytest.raises((ValueError, PluginError, asyncio.CancelledError, CancelledError)) as raised:
        if how == "generate":
            handle.generate(request(1))
        else:
            handle.stream(StreamRequest(feed=ScriptedFeed(first=[request(1)], then=lambda: None), weight_version=0))
    assert error in (raised.value, raised.value.__cause__) or (how, raised.type) == ("generate", CancelledError)


@pytest.mark.parametrize(("stops", "reason"), [((), FinishReason.ABORTED), ((9,), FinishReason.STOP)])
def test_a_stream_that_ends_hands_out_what_has_come(opened: Open, stops: tuple[int, ...], reason: FinishReason) -> None:
    """With the tokens so far; one whose stop token is there has ended, whatever was still to be said of it."""
    answers = {100: [token(5), token(9), 60.0], 101: [0.3, token(9, reason="stop" if stops else "length")]}
    feed = ScriptedFeed(
        first=[request(2, sampling=SamplingParams(stop_token_ids=stops), max_tokens=np.array([3, 1], np.int32))],
        then=lambda: None,
    )
    handle = opened(Stub(answer=lambda body: answers.get(body["seed"]) or counted(body)))
    handle.stream(StreamRequest(feed=feed, weight_version=0))
    assert feed.delivered[0].tokens.tolist() == [5, 9]
    assert feed.delivered[0].finish_reason == reason
    assert feed.delivered[1].finish_reason == (FinishReason.STOP if stops else FinishReason.LENGTH)

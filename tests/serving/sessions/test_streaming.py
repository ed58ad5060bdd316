"""Streams bring tokens while the generator samples them, and end with a client that hangs up."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from rlcore.spi import capabilities
from rlcore_serve.sessions.interface import Sample, SampleRequest
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Sessions

from .chat_model import END, Script, served

ONE = [{"role": "user", "content": "one?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Stepping(Script):
    """Says a token each time that a test lets it, and reports it to the request's reader."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.steps = threading.Semaphore(0)

    async def sample(self, request: SampleRequest) -> Sample:
        text, number = self.texts[0], 0
        for number, token in enumerate(self.tokenizer.encode(text)):
            while not self.steps.acquire(blocking=False):
                await self._wait()
            if request.on_tokens is not None:
                logprob = -(number + 1) / 8
                rows = [] if request.num_logprobs is None else [{token: logprob, 120: -9.0, 121: -8.0}]
                request.on_tokens(number, [token], rows)
        return await super().sample(request)

    async def _wait(self) -> None:
        try:
            await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise


class Endpoint:
    """A server with one session, and the script that it says."""

    def __init__(self) -> None:
        self.script, self.sessions = Stepping(), Sessions()
        self.session = self.sessions.open()
        self.address = ""

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/{self.session.token}/v1", api_key="any", max_retries=0)

    def num_recorded(self) -> int:
        return len(self.sessions.finish(self.session))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    one = Endpoint()
    able = frozenset({capabilities.STOP_STRINGS, capabilities.TOKEN_STREAMING})
    with serving(served(one.script, capabilities=able), one.sessions) as one.address:
        yield one


def test_each_token_of_a_chat_comes_before_the_next_is_sampled(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"<think>eb</think>cd{END}"]
    endpoint.script.steps.release(len("<think>") + 1)
    stream = iter(endpoint.client().chat.completions.create(model="policy", messages=ONE, stream=True))
    assert next(stream).choices[0].delta.role == "assistant"
    assert next(stream).choices[0].delta.reasoning_content == "e"
    endpoint.script.steps.release()
    assert next(stream).choices[0].delta.reasoning == "b"
    endpoint.script.steps.release(len("</think>") + 1)
    assert next(stream).choices[0].delta.content == "c"
    endpoint.script.steps.release(2)
    assert [chunk.choices[0].delta.content for chunk in stream] == ["d", None]
    assert endpoint.num_recorded() == 1


def test_a_completion_and_a_response_stream_too(endpoint: Endpoint) -> None:
    endpoint.script.texts = ["ab", f"cd{END}"]
    client = endpoint.client()
    endpoint.script.steps.release()
    text = iter(client.completions.create(model="policy", prompt="x", stream=True))
    assert next(text).choices[0].text == "a"
    endpoint.script.steps.release()
    assert [chunk.choices[0].text for chunk in text] == ["b", ""]
    endpoint.script.steps.release()
    events = iter(client.responses.create(model="policy", input="x", stream=True))
    kinds = [next(events).type for _ in range(4)]
    assert kinds == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert next(events).delta == "c"
    endpoint.script.steps.release(2)
    *_, last = events
    assert (last.type, last.response.output_text) == ("response.completed", "cd")


def test_calls_come_behind_the_text_before_them(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"So.{CALL}{END}"]
    endpoint.script.steps.release(3)
    stream = iter(endpoint.client().chat.completions.create(model="policy", messages=ONE, tools=TOOLS, stream=True))
    text = ""
    while text != "So.":
        text += next(stream).choices[0].delta.content
    endpoint.script.steps.release(len(CALL) + 1)
    calls = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert [calls[0].function.name, json.loads(calls[1].function.arguments)] == ["add", {"a": 1}]


def test_the_most_probable_tokens_are_those_of_the_generator(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"a{END}"] * 3
    endpoint.script.steps.release(100)
    client = endpoint.client()
    whole = client.chat.completions.create(model="policy", messages=ONE, logprobs=True, top_logprobs=2).choices[0]
    assert [(one.token, one.logprob) for one in whole.logprobs.content[0].top_logprobs] == [("a", -0.125), ("y", -8.0)]
    chunks = client.chat.completions.create(model="policy", messages=ONE, logprobs=True, top_logprobs=1, stream=True)
    found = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert [(one.token, len(one.top_logprobs)) for one in found] == [("a", 1), (END, 1)]
    text = client.completions.create(model="policy", prompt="x", logprobs=3, max_tokens=2).choices[0]
    assert text.logprobs.top_logprobs[0] == {"a": -0.125, "y": -8.0, "x": -9.0}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_hangs_up_ends_its_sample_and_nothing_is_recorded(endpoint: Endpoint, is_stream: bool) -> None:
    endpoint.script.texts = [f"abc{END}"]
    endpoint.script.steps.release()
    client = http.client.HTTPConnection(endpoint.address.removeprefix("http://"))
    body = json.dumps({"model": "policy", "messages": ONE, "stream": is_stream})
    client.request("POST", f"/{endpoint.session.token}/v1/chat/completions", body)
    if is_stream:
        assert client.getresponse().read1()
    time.sleep(0.1)
    client.close()
    while not endpoint.script.num_given_up:
        time.sleep(0.01)
    assert endpoint.num_recorded() == 0


def test_an_error_before_the_first_token_has_its_status(endpoint: Endpoint) -> None:
    endpoint.sessions.finish(endpoint.session)
    with pytest.raises(openai.AuthenticationError):
        endpoint.client().chat.completions.create(model="policy", messages=ONE, stream=True)


def test_an_error_behind_the_first_token_is_an_event(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"ab{END}"]
    endpoint.script.steps.release()
    stream = iter(endpoint.client().chat.completions.create(model="policy", messages=ONE, stream=True))
    next(stream)
    endpoint.sessions.finish(endpoint.session)
    endpoint.script.steps.release(2)
    with pytest.raises(openai.APIError) as failed:
        list(stream)
    assert failed.value.code == "session_finished"
    assert np.size(endpoint.script.texts) == 0

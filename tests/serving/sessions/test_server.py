"""The server as OpenAI's own client sees it."""

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rlcore.spi import ConfigError, SamplingParams
from rlcore_serve.sessions.routes import Gate
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Session, Sessions

from .chat_model import END, END_ID, ChatMl, Script, served

ONE = [{"role": "user", "content": "one?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class Endpoint:
    """A server, a session on it, and the script that it says."""

    def __init__(self, script: Script, sessions: Sessions, address: str) -> None:
        self.script, self.sessions, self.address = script, sessions, address
        self.session = sessions.open()

    def client(self, session: Session | None = None, **options: Any) -> openai.OpenAI:
        """A client whose base_url has the session's token in it."""
        token = (session or self.session).token
        return openai.OpenAI(**{"base_url": f"{self.address}/{token}/v1", "api_key": "any", "max_retries": 0} | options)

    def recorded(self) -> list[str]:
        """The tokens in the loss of each of the session's segments; the session ends."""
        segments = self.sessions.finish(self.session)
        return [ChatMl().show(segment.tokens[segment.loss_mask].tolist()) for segment in segments]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    script, sessions = Script(), Sessions()
    with serving(served(script), sessions, max_waiting=2) as address:
        yield Endpoint(script, sessions, address)


def test_a_chat_of_two_turns_with_tools_is_recorded(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"{CALL}{END}", f"it is 1{END}"]
    client, messages = endpoint.client(), list[Any](ONE)
    first = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1}
    assert first.usage.total_tokens == first.usage.prompt_tokens + len(endpoint.script.tokenizer.encode(CALL)) + 1
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}]
    second = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("it is 1", "stop")
    assert endpoint.recorded() == [f"{CALL}{END}it is 1{END}"]


def test_a_bearer_token_does_as_well_as_one_in_the_path(endpoint: Endpoint) -> None:
    endpoint.script.texts = ["a"]
    client = endpoint.client(base_url=f"{endpoint.address}/v1", api_key=endpoint.session.token)
    assert client.models.list().data[0].id == "policy"
    assert client.models.retrieve("policy").id == "policy"
    assert client.completions.create(model="policy", prompt="ab", max_tokens=1).choices[0].finish_reason == "length"
    assert endpoint.recorded() == ["a"]


def test_answers_have_log_probabilities(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"aé\ufffd{END}", "cd"]
    chat = endpoint.client().chat.completions.create(model="policy", messages=ONE, logprobs=True)
    content = chat.choices[0].logprobs.content
    said = [("a", -0.125), ("é", -0.25), ("\ufffd", -0.375), (END, -0.5)]
    assert [(one.token, one.logprob) for one in content] == said
    assert [one.bytes for one in content[:3]] == [[97], [195, 169], None]  # the last one stands for a part of a character
    text = endpoint.client().completions.create(model="policy", prompt="x", logprobs=0)
    assert text.choices[0].logprobs.token_logprobs == [-0.125, -0.25]
    assert text.choices[0].logprobs.text_offset == [0, 1]


def test_tokens_are_returned_where_vllm_returns_them(endpoint: Endpoint) -> None:
    endpoint.script.texts = ["ab"] * 4
    client, more = endpoint.client(), {"return_token_ids": True}
    said, read = ChatMl().encode("ab"), ChatMl().encode("x")
    text = client.completions.create(model="policy", prompt="x", extra_body=more).choices[0]
    assert (text.token_ids, text.prompt_token_ids) == (said, read)
    chat = client.chat.completions.create(model="policy", messages=ONE, extra_body=more)
    assert chat.choices[0].token_ids == said
    assert chat.usage.prompt_tokens == len(chat.prompt_token_ids)
    first, *_ = client.completions.create(model="policy", prompt="x", stream=True, extra_body=more)
    assert (first.choices[0].token_ids, first.choices[0].prompt_token_ids) == (said, read)
    assert not hasattr(client.completions.create(model="policy", prompt="x").choices[0], "token_ids")


def test_streams_say_the_same_as_whole_answers(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"a{END}", f"b{END}", f"{CALL}{END}", "c"]
    client = endpoint.client()
    options: dict[str, Any] = {"model": "policy", "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(messages=ONE, n=2, **options))
    said = [(chunk.choices[0].index, chunk.choices[0].delta.content) for chunk in chunks[:-1]]
    assert said == [(0, ""), (0, "a"), (0, None), (1, ""), (1, "b"), (1, None)]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "stop", None, None, "stop"]
    assert chunks[-1].usage.completion_tokens == 4
    calls = list(client.chat.completions.create(messages=ONE, tools=TOOLS, **options))
    assert calls[1].choices[0].delta.tool_calls[0].function.name == "add"
    assert json.loads(calls[2].choices[0].delta.tool_calls[0].function.arguments) == {"a": 1}
    assert calls[3].choices[0].finish_reason == "tool_calls"
    texts = list(client.completions.create(prompt="x", **options))
    assert [chunk.choices[0].text for chunk in texts[:-1]] == ["c", ""]
    assert endpoint.recorded() == [f"a{END}", f"b{END}", f"{CALL}{END}", "c"]


def test_errors_are_those_that_clients_know(endpoint: Endpoint) -> None:
    client = endpoint.client()
    with pytest.raises(openai.NotFoundError) as no_model:
        client.chat.completions.create(model="gpt", messages=ONE)
    assert no_model.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    with pytest.raises(openai.NotFoundError, match="found POST /v1/embeddings; expected") as no_route:
        client.embeddings.create(model="policy", input="x")
    assert endpoint.session.token not in str(no_route.value)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="policy", messages=[], temperature=3, top_logprobs=2, extra_body={"beams": 1})
    assert all(name in str(bad.value) for name in ("messages", "temperature", "top_logprobs", "beams"))
    for options in ({"base_url": f"{endpoint.address}/{'0' * 32}/v1"}, {"base_url": f"{endpoint.address}/v1"}):
        with pytest.raises(openai.AuthenticationError) as wrong:
            endpoint.client(**options).models.list()
        assert wrong.value.code == "invalid_api_key"
    endpoint.sessions.finish(endpoint.session)
    with pytest.raises(openai.AuthenticationError) as finished:
        client.chat.completions.create(model="policy", messages=ONE)
    assert finished.value.code == "session_finished"


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 200_000, b'{"model": "policy", "prompt": "\\ud800"}'])
def test_a_body_that_is_no_json_is_refused(endpoint: Endpoint, body: bytes) -> None:
    url = f"{endpoint.address}/{endpoint.session.token}/v1/completions"
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, data=body))
    assert caught.value.code == 400
    assert json.loads(caught.value.read())["error"]["type"] == "invalid_request_error"


def test_a_generator_that_fails_is_an_error_of_the_server(endpoint: Endpoint) -> None:
    with pytest.raises(openai.InternalServerError, match="IndexError"):
        endpoint.client().completions.create(model="policy", prompt="x")  # the script is empty


def test_what_is_no_exception_ends_its_request_and_not_the_server(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SystemExit("planted")

    monkeypatch.setattr("rlcore_serve.sessions.routes.read_request", fail)
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="SystemExit: planted"):
            endpoint.client().completions.create(model="policy", prompt="x")


def test_the_bound_of_waiting_samples(endpoint: Endpoint) -> None:
    endpoint.script.texts = ["a", "b", "c"]
    endpoint.script.waits = True
    client = endpoint.client()
    waiting = threading.Thread(target=client.completions.create, kwargs={"model": "policy", "prompt": "x", "n": 2})
    waiting.start()
    while len(endpoint.script.requests) < 2:
        waiting.join(0.01)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="policy", prompt="x")
    endpoint.script.waits = False
    waiting.join()
    assert client.completions.create(model="policy", prompt="x").choices[0].text == "c"


def test_what_a_client_no_longer_waits_for_is_not_recorded(endpoint: Endpoint) -> None:
    endpoint.script.texts = ["a", "b"]
    endpoint.script.waits = True
    client = http.client.HTTPConnection(endpoint.address.removeprefix("http://"))
    body = json.dumps({"model": "policy", "prompt": "x"})
    client.request("POST", f"/{endpoint.session.token}/v1/completions", body)
    while not endpoint.script.requests:
        time.sleep(0.01)
    client.close()
    while not endpoint.script.num_given_up:
        time.sleep(0.01)
    endpoint.script.waits = False
    endpoint.client().completions.create(model="policy", prompt="x")
    assert endpoint.recorded() == ["b"]


def test_anonymous_clients_are_answered_where_they_may_be() -> None:
    script = Script(f"a{END}", f"b{END}")
    anonymous = Session(token="", record=None)
    with serving(served(script, sampling=SamplingParams(stop_token_ids=(END_ID,))), Sessions(anonymous)) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="whatever")
        for expected in ("a", "b"):
            assert client.chat.completions.create(model="policy", messages=ONE).choices[0].message.content == expected
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{address}/other/v1", api_key="whatever").models.list()
        assert not script.texts
        with urllib.request.urlopen(f"{address}/health") as response:
            assert json.loads(response.read()) == {"status": "ok"}


def test_a_key_that_all_share_is_asked_for() -> None:
    script = Script(f"a{END}")
    with serving(served(script), Sessions(Session(token="key", record=None))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="key")
        assert client.completions.create(model="policy", prompt="x").choices[0].text == "a"
        with pytest.raises(openai.AuthenticationError, match="another API key"):
            client.with_options(api_key="kez").models.list()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{address}/v1/models")


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught, serving(served(Script()), Sessions(), port=port):
            pass
    (problem,) = caught.value.problems
    assert (problem.path, problem.found) == ("--port", f"{port} on 127.0.0.1: address already in use")


def test_nothing_is_let_in_at_the_end() -> None:
    gate = Gate(1)
    gate.is_closed = True
    with pytest.raises(Exception, match="ends") as caught:
        gate.enter(1)
    assert caught.value.status == 503  # type: ignore[attr-defined]

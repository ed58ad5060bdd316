"""Requests are read strictly."""

from typing import Any

import numpy as np
import pytest

from rlcore.spi import SamplingParams
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.requests import AnswerRequest, read_request

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
DEFAULT = SamplingParams(temperature=0.7, stop_token_ids=(2,), stop_strings=("#",))


def chat(**body: Any) -> AnswerRequest:
    messages = [{"role": "user", "content": "a"}]
    return read_request({"model": "m", "messages": messages} | body, DEFAULT, is_chat=True)


def completion(**body: Any) -> AnswerRequest:
    return read_request({"model": "m", "prompt": "a"} | body, DEFAULT, is_chat=False)


def test_what_is_left_out_is_the_default() -> None:
    request = chat(
        temperature=None, max_tokens=None, stop=None, user="me", tool_choice="auto", response_format={"type": "text"}
    )
    assert (request.sampling, request.chooses_distribution) == (DEFAULT, False)
    assert (request.max_tokens, request.n, request.seed, request.stream, request.logprobs) == (None, 1, None, False, False)
    assert completion().max_tokens == 16


def test_what_is_given_counts() -> None:
    request = chat(temperature=0, top_p=0.5, top_k=-1, stop=["x", "y"], max_completion_tokens=3, max_tokens=9, seed=-1, n=2)
    expected = SamplingParams(temperature=0.0, top_p=0.5, stop_token_ids=(2,), stop_strings=("#", "x", "y"))
    assert (request.sampling, request.chooses_distribution) == (expected, True)
    assert (request.max_tokens, request.seed, request.n) == (3, 2**63 - 1, 2)
    assert completion(logprobs=0).logprobs
    assert not chat(tools=[TOOL], tool_choice="none").tools


@pytest.mark.parametrize(("ignored", "expected"), [(False, (2, 5)), (True, (5, 2))])
def test_stop_tokens_come_beside_the_models_own_or_in_their_place(ignored: bool, expected: tuple[int, ...]) -> None:
    request = completion(stop_token_ids=[5, 2], ignore_eos=ignored, min_p=0.0, repetition_penalty=1.0)
    assert request.sampling.stop_token_ids == expected
    assert not request.chooses_distribution
    assert completion(ignore_eos=True).sampling.stop_token_ids == ()


def test_messages_are_text_and_arguments_objects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    odd = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{"}}
    request = chat(
        messages=[
            {"role": "user", "content": parts, "name": "n", "refusal": None},
            {"role": "assistant", "content": None, "tool_calls": [call, odd]},
        ]
    )
    first, second = request.messages
    assert first == {"role": "user", "content": "ab", "name": "n"}
    assert second["content"] == ""
    assert [one["function"]["arguments"] for one in second["tool_calls"]] == [{"x": 1}, "{"]


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_prompts_may_be_tokens(prompt: Any) -> None:
    np.testing.assert_array_equal(completion(prompt=prompt).prompt, np.int32([1, 2]))
    assert completion(prompt=["a"]).prompt == "a"


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": "a", "name": 3}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "function_call": {"arguments": "{}"}}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}]}, "messages[0]"),
        ({"tools": 3}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "web_search"}]}, "tools[1]"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "tools[0]"),
        ({"top_k": 2**31}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e-30}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stream": 1}, "stream"),
        ({"record": "no"}, "record"),
        ({"stream_options": 1}, "stream_options"),
        ({"stream_options": {"include_usage": "no"}}, "stream_options"),
        ({"stream_options": {"include_usag": True}}, "stream_options"),
        ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
def test_what_is_not_understood_is_refused(body: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**body)
    assert caught.value.status == 400
    assert caught.value.body()["error"]["param"] == name
    assert str(caught.value).startswith(f"{name}: found ")


@pytest.mark.parametrize("prompt", [None, [], ["a", "b"], [[1], [2]], [1, "a"], [-1], 3])
def test_prompts_that_are_none_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt: found"):
        completion(prompt=prompt)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(RequestError) as caught:
        completion(n=0, echo=True, best_of=2, logprobs=21)
    assert [part.partition(":")[0] for part in str(caught.value).splitlines()] == ["echo", "best_of", "n", "logprobs"]


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(RequestError, match="list"):
        read_request([], DEFAULT, is_chat=True)

"""Every key that OpenAI's client can send is read, taken without effect, or refused by name."""

import json
from typing import Any, get_args

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from openai.types.responses.response_includable import ResponseIncludable

from rlcore.spi import SamplingParams
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.request_keys import INCLUDED, KEYS, Api
from rlcore_serve.sessions.requests import AnswerRequest, read_request
from rlcore_serve.sessions.response_requests import read_response_request

PARAMETERS: dict[Api, tuple[type, ...]] = {
    "chat": (chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming),
    "completions": (text_params.CompletionCreateParamsNonStreaming, text_params.CompletionCreateParamsStreaming),
    "responses": (response_params.ResponseCreateParamsNonStreaming, response_params.ResponseCreateParamsStreaming),
}
FUNCTION = {"name": "f", "parameters": {}}
WEATHER = {"type": "function", "function": FUNCTION}
ALL: tuple[Api, ...] = ("chat", "completions", "responses")
TALKS: tuple[Api, ...] = ("chat", "responses")
SAMPLED: tuple[Api, ...] = ("chat", "completions")


def read(api: Api, **body: Any) -> AnswerRequest:
    head: dict[str, Any] = {"model": "m"}
    if api == "responses":
        return read_response_request(head | {"input": "a"} | body, SamplingParams())
    prompt = {"messages": [{"role": "user", "content": "a"}]} if api == "chat" else {"prompt": "a"}
    return read_request(head | prompt | body, SamplingParams(), is_chat=api == "chat")


@pytest.mark.parametrize("api", ALL)
def test_all_keys_of_the_clients_types_are_in_the_table(api: Api) -> None:
    typed = {name for cls in PARAMETERS[api] for name in cls.__annotations__}
    for cls in PARAMETERS[api]:
        typed |= cls.__required_keys__ | cls.__optional_keys__  # type: ignore[attr-defined]
    assert not typed - KEYS[api].keys()


def test_all_that_may_be_included_is_known() -> None:
    assert set(INCLUDED) == set(get_args(ResponseIncludable))


def each(cases: dict[tuple[Api, ...], dict[str, list[Any]]]) -> list[Any]:
    return [
        pytest.param(api, name, value, id=f"{api}-{name}-{json.dumps(value):.24}")
        for apis, keys in cases.items()
        for name, values in keys.items()
        for value in values
        for api in apis
    ]


@pytest.mark.parametrize(
    ("api", "name", "value"),
    each(
        {
            ALL: {
                "metadata": [{"a": "b"}],
                "prompt_cache_key": ["k"],
                "prompt_cache_retention": ["24h"],
                "safety_identifier": ["s"],
                "seed": [3],
                "service_tier": ["auto", "flex"],
                "store": [True, False],
                "stream": [True, False],
                "user": ["me"],
            },
            TALKS: {"parallel_tool_calls": [True], "tool_choice": ["auto", "none"], "top_logprobs": [0]},
            SAMPLED: {"stream_options": [{"include_usage": True, "include_obfuscation": False}]},
            ("chat",): {"modalities": [["text"]], "prediction": [{"type": "content", "content": "x"}], "functions": [[]]},
            ("responses",): {
                "background": [False],
                "context_management": [[]],
                "include": [[], ["reasoning.encrypted_content"], ["reasoning.encrypted_content", INCLUDED[0]]],
                "max_tool_calls": [3],
                "stream_options": [{"include_obfuscation": False}],
                "text": [{"format": {"type": "text"}}, {}],
                "truncation": ["disabled"],
            },
        }
    ),
)
def test_keys_that_change_no_answer_are_taken(api: Api, name: str, value: Any) -> None:
    assert read(api, **{name: value}).notes == {}


@pytest.mark.parametrize(
    ("api", "name", "value"),
    each(
        {
            TALKS: {
                "parallel_tool_calls": [False],
                "tool_choice": ["required", WEATHER, {"type": "function", "name": "f"}, {"type": "allowed_tools", "tools": []}],
            },
            ("chat",): {"reasoning_effort": ["low", "none"], "verbosity": ["high"]},
            ("responses",): {
                "reasoning": [{"effort": "low"}, {"summary": "auto"}, {}],
                "text": [{"verbosity": "low"}, {"format": {"type": "text"}, "verbosity": "low"}],
                "truncation": ["auto"],
            },
        }
    ),
)
def test_wishes_that_no_sampler_fulfils_are_told(api: Api, name: str, value: Any) -> None:
    tools = [{"type": "function", **FUNCTION}] if api == "responses" else [WEATHER]
    request = read(api, tools=tools, **{name: value})
    assert list(request.notes) == [name]
    assert len(request.tools) == 1


@pytest.mark.parametrize(
    ("api", "name", "value"),
    each(
        {
            ALL: {"beams": [1], "min_p": [0.5], "repetition_penalty": [1.1, True], "guided_json": [{}]},
            TALKS: {
                "moderation": [{"model": "m"}],
                "parallel_tool_calls": [0, "no"],
                "tool_choice": ["sometimes", 3, {"type": "file_search"}, {}],
                "top_logprobs": [2, False],
            },
            SAMPLED: {
                "echo": [True],
                "best_of": [2, True],
                "frequency_penalty": [0.5],
                "presence_penalty": [0.5],
                "logit_bias": [{"3": 1}],
            },
            ("completions",): {"suffix": ["x"], "tools": [[]], "max_completion_tokens": [3]},
            ("chat",): {
                "audio": [{"voice": "v"}],
                "function_call": [{"name": "f"}],
                "functions": [[FUNCTION]],
                "include": [[]],
                "modalities": [["text", "audio"]],
                "reasoning_effort": [3],
                "response_format": [{"type": "json_object"}],
                "web_search_options": [{}],
            },
            ("responses",): {
                "background": [True],
                "context_management": [[{"type": "compaction"}]],
                "conversation": ["c"],
                "include": [["thoughts"], "reasoning.encrypted_content", [3], [["a"]]],
                "max_tokens": [3],
                "messages": [[]],
                "n": [2],
                "previous_response_id": ["resp_1"],
                "prompt": [{"id": "p"}],
                "reasoning": ["low"],
                "return_token_ids": [True],
                "stream": [1],
                "text": [{"format": {"type": "json_object"}}, {"style": "x"}, "short"],
                "truncation": ["middle"],
            },
        }
    ),
)
def test_what_is_not_done_is_refused_by_name(api: Api, name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(api, **{name: value})
    assert caught.value.status == 400
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [name]

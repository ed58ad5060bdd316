"""Every key that OpenAI's client can send is read, taken without effect, or refused by name."""

import json
from typing import Any, get_args

import pytest
from attrs import asdict
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
DEFAULT = SamplingParams(stop_token_ids=(2,))
FUNCTION = {"name": "f", "parameters": {}}
WEATHER = {"type": "function", "function": FUNCTION}
ALL: tuple[Api, ...] = ("chat", "completions", "responses")
TALKS: tuple[Api, ...] = ("chat", "responses")
SAMPLED: tuple[Api, ...] = ("chat", "completions")


def read(api: Api, **body: Any) -> AnswerRequest:
    head: dict[str, Any] = {"model": "m"}
    if api == "responses":
        return read_response_request(head | {"input": "a"} | body, DEFAULT)
    prompt = {"messages": [{"role": "user", "content": "a"}]} if api == "chat" else {"prompt": "a"}
    return read_request(head | prompt | body, DEFAULT, is_chat=api == "chat")


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


USED = each(
    {
        ALL: {
            "ignore_eos": [True],
            "model": ["another"],
            "record": [False],
            "seed": [4],
            "stop": ["x", ["x"]],
            "stop_token_ids": [[7]],
            "stream": [True],
            "temperature": [0.5],
            "top_k": [3],
            "top_p": [0.5],
        },
        TALKS: {"chat_template_kwargs": [{"a": 1}]},
        SAMPLED: {
            "max_tokens": [3],
            "n": [2],
            "return_token_ids": [True],
            "stream_options": [{"include_usage": True}],
        },
        ("chat",): {
            "logprobs": [True],
            "max_completion_tokens": [3],
            "messages": [[{"role": "user", "content": "b"}]],
            "response_format": [{"type": "json_object"}],
            "tools": [[WEATHER]],
        },
        ("completions",): {"logprobs": [0, 1], "prompt_logprobs": [0, 3], "prompt": ["b", [5], [[5]]]},
        ("responses",): {
            "include": [["message.output_text.logprobs"]],
            "input": ["b", [{"role": "user", "content": "b"}]],
            "instructions": ["c"],
            "max_output_tokens": [3],
            "text": [{"format": {"type": "json_object"}}],
            "tools": [[{"type": "function", **FUNCTION}]],
        },
    }
)


@pytest.mark.parametrize(("api", "name", "value"), USED)
def test_keys_that_are_used_change_the_request(api: Api, name: str, value: Any) -> None:
    assert str(asdict(read(api, **{name: value}))) != str(asdict(read(api)))


NO_EFFECT = each(
    {
        ALL: {
            "metadata": [{"a": "b"}],
            "prompt_cache_key": ["k"],
            "prompt_cache_options": [{}],
            "prompt_cache_retention": ["24h"],
            "safety_identifier": ["s"],
            "service_tier": ["auto", "flex"],
            "store": [True, False],
            "stream": [True, False],
            "user": ["me"],
        },
        TALKS: {"parallel_tool_calls": [True], "tool_choice": ["auto", "none"], "top_logprobs": [0]},
        SAMPLED: {"stream_options": [{"include_usage": True, "include_obfuscation": False}]},
        ("chat",): {"modalities": [["text"]], "prediction": [{"type": "content", "content": "x"}], "functions": [[]]},
        ("responses",): {
            "access_programs": [{}],
            "background": [False],
            "background_options": [{"completion_window": "soonest"}],
            "context_management": [[]],
            "image": [{}],
            "include": [[], ["reasoning.encrypted_content"], ["reasoning.encrypted_content", INCLUDED[0]]],
            "max_tool_calls": [3],
            "stream_options": [{"include_obfuscation": False}],
            "text": [{"format": {"type": "text"}}, {}],
            "truncation": ["disabled"],
        },
    }
)


@pytest.mark.parametrize(("api", "name", "value"), NO_EFFECT)
def test_keys_that_change_no_answer_are_taken(api: Api, name: str, value: Any) -> None:
    assert read(api, **{name: value}).notes == {}


TOLD = each(
    {
        TALKS: {
            "parallel_tool_calls": [False],
        },
        ("chat",): {"reasoning_effort": ["low", "none"], "verbosity": ["high"]},
        ("responses",): {
            "reasoning": [{"effort": "low"}, {"summary": "auto"}, {}],
            "text": [{"verbosity": "low"}, {"format": {"type": "text"}, "verbosity": "low"}],
            "truncation": ["auto"],
        },
    }
)


@pytest.mark.parametrize(("api", "name", "value"), TOLD)
def test_wishes_that_no_sampler_fulfils_are_told(api: Api, name: str, value: Any) -> None:
    tools = [{"type": "function", **FUNCTION}] if api == "responses" else [WEATHER]
    request = read(api, tools=tools, **{name: value})
    assert list(request.notes) == [name]
    assert len(request.tools) == 1


REFUSED = each(
    {
        ALL: {
            "add_generation_prompt": [False],
            "beams": [1],
            "continue_final_message": [True],
            "guided_json": [{}],
            "include_stop_str_in_output": [True],
            "min_p": [0.5],
            "min_tokens": [1],
            "repetition_penalty": [1.1, True],
            "skip_special_tokens": [False],
        },
        TALKS: {
            "moderation": [{"model": "m"}],
            "parallel_tool_calls": [0, "no"],
            "tool_choice": [
                *("sometimes", 3, {"type": "file_search"}, {}, {"type": "allowed_tools", "tools": []}),
                *("required", WEATHER, {"type": "function", "name": "g"}),  # of no tools
            ],
            "top_logprobs": [False, 21],
        },
        SAMPLED: {
            "echo": [True],
            "best_of": [2, True],
            "frequency_penalty": [0.5],
            "presence_penalty": [0.5],
            "logit_bias": [{"3": 1}],
        },
        ("completions",): {
            "max_completion_tokens": [3],
            "prompt_logprobs": [-1, 21, True, "all"],
            "suffix": ["x"],
            "tools": [[]],
            "top_logprobs": [3],
        },
        ("chat",): {
            "audio": [{"voice": "v"}],
            "function_call": [{"name": "f"}],
            "functions": [[FUNCTION]],
            "include": [[]],
            "modalities": [["text", "audio"]],
            "reasoning_effort": [3],
            "response_format": [{"type": "xml"}],
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
            "text": [{"format": {"type": "xml"}}, {"style": "x"}, "short"],
            "truncation": ["middle"],
        },
    }
)


@pytest.mark.parametrize(("api", "name", "value"), REFUSED)
def test_what_is_not_done_is_refused_by_name(api: Api, name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read(api, **{name: value})
    assert caught.value.status == 400
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [name]


@pytest.mark.parametrize("api", ALL)
def test_each_key_is_in_a_table_above(api: Api) -> None:
    assert {case.values[1] for case in (*USED, *NO_EFFECT, *TOLD, *REFUSED) if case.values[0] == api} >= KEYS[api].keys()

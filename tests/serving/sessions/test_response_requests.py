"""Requests of the Responses API are read strictly, and are chats."""

from typing import Any

import pytest

from rlcore.spi import SamplingParams
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.requests import AnswerRequest, read_request
from rlcore_serve.sessions.response_requests import read_response_request

DEFAULT = SamplingParams(temperature=0.7, stop_token_ids=(2,), stop_strings=("#",))
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "f", "arguments": '{"x": 1}', "status": "completed"}
PART = {"type": "input_text", "text": "a"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "2"}


def read(**body: Any) -> AnswerRequest:
    return read_response_request({"model": "m", "input": "a"} | body, DEFAULT)


def faults(**body: Any) -> list[str]:
    with pytest.raises(RequestError) as caught:
        read(**body)
    assert caught.value.status == 400
    return str(caught.value).split("\n")


def test_a_text_is_a_users_message_behind_the_instructions() -> None:
    assert read().messages == ({"role": "user", "content": "a"},)
    expected = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "a"})
    assert read(instructions="be brief").messages == expected


def test_what_chat_has_counts_as_in_chat() -> None:
    same = {"model": "m", "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 4, "stop": ["x"], "record": False}
    same |= {"metadata": {"a": "b"}, "store": True, "tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": 0}
    request = read(**same, max_output_tokens=5, include=["message.output_text.logprobs"], truncation="disabled", stream=False)
    chat = same | {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "logprobs": True}
    expected = read_request(chat, DEFAULT, is_chat=True)
    for name in ("sampling", "chooses_distribution", "max_tokens", "seed", "record", "logprobs", "messages", "stream", "n"):
        assert getattr(request, name) == getattr(expected, name), name


def test_what_is_null_is_left_out() -> None:
    request = read(temperature=None, background=None, previous_response_id=None, tools=None, text={})
    assert (request.sampling, request.max_tokens, request.tools, request.logprobs) == (DEFAULT, None, (), False)


def test_calls_belong_to_the_answer_before_them() -> None:
    said = {"type": "message", "id": "msg", "status": "completed", "role": "assistant"}
    said["content"] = [{"type": "output_text", "text": "let me see", "annotations": []}]
    question = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    thought = {"type": "reasoning", "id": "rs", "summary": []}
    parts = RESULT | {"output": [{"type": "input_text", "text": "3"}]}
    request = read(input=[question, thought, said, CALL, CALL | {"call_id": "2"}, RESULT, parts, CALL])
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}
    assert request.messages == (
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "let me see", "tool_calls": [call, call | {"id": "2"}]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )


def test_a_call_that_begins_an_answer_joins_no_message_before_it() -> None:
    said, first = {"role": "assistant", "content": "what is it?"}, CALL | {"call_id": "call_first_1"}
    request = read(input=[said, first, CALL, first])
    assert [message["role"] for message in request.messages] == ["assistant"] * 3
    assert [len(message.get("tool_calls", ())) for message in request.messages] == [0, 2, 1]


def test_tools_are_those_of_a_chat() -> None:
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert read(tools=[TOOL]).tools == ({"type": "function", "function": function},)
    assert read(tools=[TOOL], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens: found 0"),
        ({"max_output_tokens": "9"}, "max_output_tokens: found"),
        ({"include": ["reasoning"]}, "include: found"),
        ({"include": 3}, "include: found 3"),
        ({"instructions": 3}, "instructions: found 3"),
        ({"temperature": 3}, "temperature: found 3"),
        ({"tools": {}}, "tools: found"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]: found"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "f"}}]}, "tools[1]: found"),
        ({"input": None}, "input: found null"),
        ({"input": []}, "input: found []"),
        ({"input": ["a"]}, "input[0]: found"),
        ({"input": [{"role": "user"}]}, "input[0]: found the content null"),
        ({"input": [{"content": "a"}]}, "input[0]: found the role null"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0]: found the content"),
        ({"input": [{"type": "reasoning", "summary": ["a"]}]}, "input[0]: found"),
        ({"input": [{"type": "reasoning", "encrypted_content": "a"}]}, "input[0]: found reasoning with encrypted_content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]: found"),
        ({"input": [{"type": ["a"]}]}, "input[0]: found"),
        ({"input": [CALL | {"arguments": {}}]}, "input[0]: found"),
        ({"input": [RESULT | {"output": None}]}, "input[0]: found"),
        ({"input": [{"role": "user", "content": "a", "weight": 0}]}, "input[0]: found the unknown field 'weight'"),
        ({"input": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "input[0]: found the unknown field 'tool_calls'"),
        ({"input": [{"role": "user", "content": [PART | {"file_id": "a"}]}]}, "input[0]: found the unknown field 'file_id'"),
        ({"input": [CALL | {"namespace": "n"}]}, "input[0]: found the unknown field 'namespace'"),
        ({"input": [RESULT | {"output": [PART | {"x": 1}]}]}, "input[0]: found the unknown field 'x'"),
        ({"input": [{"type": "reasoning", "text": "a"}]}, "input[0]: found the unknown field 'text'"),
    ],
)
def test_what_is_not_done_is_refused_by_name(body: dict[str, Any], said: str) -> None:
    (fault,) = faults(**body)
    assert fault.startswith(said)


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {}}]},
        {"role": "assistant", "content": "a", "phase": "final_answer", "id": "m", "status": "completed", "weight": None},
        CALL | {"id": "i", "status": "completed", "async": False, "namespace": ""},
        RESULT | {"id": "i", "status": "completed", "name": "f"},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": None, "status": None},
    ],
)
def test_fields_without_effect_or_value_are_taken(item: dict[str, Any]) -> None:
    assert read(input=[CALL, item]).messages


def test_all_that_is_wrong_is_said_together() -> None:
    found = faults(model=None, input=[CALL, 1, 2], background=True, top_p=2, tools=[3])
    assert [fault.partition(":")[0] for fault in found] == ["background", "input[1]", "input[2]", "tools[0]", "model", "top_p"]
    with pytest.raises(RequestError, match="found a list"):
        read_response_request([], DEFAULT)

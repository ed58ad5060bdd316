"""The server as Anthropic's own client sees it."""

import json
from collections.abc import Iterator
from typing import Any, get_args

import anthropic
import pytest
from anthropic.types import message_create_params as params

from rlcore.spi import SamplingParams, capabilities
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.message_requests import read_message_request
from rlcore_serve.sessions.request_keys import KEYS
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Session, Sessions

from .chat_model import END, END_ID, ChatMl, Script, served

DEFAULT = SamplingParams(stop_token_ids=(END_ID,))
ONE: list[Any] = [{"role": "user", "content": "1+0?"}]
TOOLS: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
HEAD: dict[str, Any] = {"model": "policy", "max_tokens": 500}
FORMAT: dict[str, Any] = {"format": {"type": "json_schema", "schema": {"type": "object"}}}


class Endpoint:
    """A server, a session on it, and the script that it says."""

    def __init__(self, script: Script, sessions: Sessions, address: str) -> None:
        self.script, self.sessions = script, sessions
        self.session = sessions.open()
        self.base_url = f"{address}/{self.session.token}/v1"
        self.client = anthropic.Anthropic(base_url=self.base_url, api_key="any", max_retries=0)

    def recorded(self) -> list[str]:
        """The tokens in the loss of each of the session's segments; the session ends."""
        segments = self.sessions.finish(self.session)
        return [ChatMl().show(segment.tokens[segment.loss_mask].tolist()) for segment in segments]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    script, sessions = Script(), Sessions()
    with serving(served(script), sessions) as address:
        yield Endpoint(script, sessions, address)


def test_a_chat_with_thoughts_and_tools_is_one_recorded_sequence(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"<think>Hm.</think>So.{CALL}{END}", f"it is 1{END}"]
    create = endpoint.client.messages.create
    first = create(messages=ONE, system="Be brief.", tools=TOOLS, **HEAD)
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (first.content[0].thinking, first.content[1].text, first.content[2].input) == ("Hm.", "So.", {"a": 1})
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": first.content[2].id, "content": [{"type": "text", "text": "1"}]}
    messages = [*ONE, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = create(messages=messages, system="Be brief.", tools=TOOLS, **HEAD)
    assert (second.content[0].text, second.stop_reason) == ("it is 1", "end_turn")
    assert second.usage.input_tokens == len(endpoint.script.requests[1].prompt)
    assert endpoint.recorded() == [f"<think>Hm.</think>So.{CALL}{END}it is 1{END}"]


@pytest.mark.parametrize(
    ("said", "options", "reason", "stop"),
    [
        ("a", {}, "max_tokens", None),
        ("abSTOP", {"stop_sequences": ["STOP"]}, "stop_sequence", "STOP"),
        (f"a{END}", {}, "end_turn", None),
    ],
)
def test_why_an_answer_ended(endpoint: Endpoint, said: str, options: dict[str, Any], reason: str, stop: str | None) -> None:
    endpoint.script.texts = [said]
    answer = endpoint.client.messages.create(messages=ONE, **HEAD, **options)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, stop)
    assert "STOP" not in answer.content[0].text


def test_a_stream_says_the_same_as_a_whole_answer(endpoint: Endpoint) -> None:
    said = f"<think>Hm.</think>So.{CALL}{END}"
    endpoint.script.texts = [said, said]
    whole = endpoint.client.messages.create(messages=ONE, tools=TOOLS, **HEAD)
    with endpoint.client.messages.stream(messages=ONE, tools=TOOLS, **HEAD) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert [kind for kind in kinds if kind in ("message_start", "message_delta", "message_stop")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    shown = [[block.model_dump(exclude={"id", "parsed_output"}) for block in one.content] for one in (whole, final)]
    assert shown[0] == shown[1]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_counting_tokens_samples_nothing(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f"a{END}"]
    counted = endpoint.client.messages.count_tokens(model="policy", messages=ONE, system="Be brief.")
    assert (endpoint.script.requests, endpoint.session.num_samples) == ([], 0)
    answer = endpoint.client.messages.create(messages=ONE, system="Be brief.", **HEAD)
    assert counted.input_tokens == answer.usage.input_tokens


def test_a_tool_can_be_forced(endpoint: Endpoint) -> None:
    endpoint.script.texts = [f' {{"a": 2}}}}</tool_call>{END}']
    answer = endpoint.client.messages.create(messages=ONE, tools=TOOLS, tool_choice={"type": "tool", "name": "add"}, **HEAD)
    assert answer.content[0].input == {"a": 2}


def test_errors_are_those_that_clients_know(endpoint: Endpoint) -> None:
    create = endpoint.client.messages.create
    with pytest.raises(anthropic.NotFoundError) as no_model:
        create(messages=ONE, model="claude", max_tokens=3)
    assert no_model.value.body["error"]["type"] == "not_found_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.BadRequestError) as bad:
        create(messages=[], extra_body={"beams": 1}, **HEAD)
    assert all(name in str(bad.value) for name in ("messages", "beams", "invalid_request_error"))
    wrong = anthropic.Anthropic(
        base_url=endpoint.base_url.replace(endpoint.session.token, "0" * 32), api_key="any", max_retries=0
    )
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(messages=ONE, **HEAD)


def test_the_key_is_that_of_the_header_too() -> None:
    script = Script(f"a{END}")
    able = frozenset({capabilities.STOP_STRINGS})
    with serving(served(script, capabilities=able), Sessions(Session(token="key", record=None))) as address:
        client = anthropic.Anthropic(base_url=address, api_key="key", max_retries=0)
        assert client.messages.create(messages=ONE, **HEAD).content[0].text == "a"
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="kez").messages.create(messages=ONE, **HEAD)


def test_all_keys_of_the_clients_types_are_in_the_table() -> None:
    typed = {name for cls in get_args(params.MessageCreateParams) for name in (cls.__required_keys__ | cls.__optional_keys__)}
    assert not typed - KEYS["messages"].keys()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]: found"),
        ({"messages": [{"role": "user", "content": "a", "name": "n"}]}, "messages[0]: found the unknown field 'name'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0]: found the block"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0]: found a block text with text null"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}]},
            "messages[0]: found a block text",
        ),
        ({"tool_choice": {"type": "auto", "parallel": False, "names": 1}}, "tool_choice: found the unknown field 'names'"),
        ({"system": [{"type": "image"}]}, "system: found"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]: found"),
        ({"tool_choice": "any"}, "tool_choice: found"),
        ({"tool_choice": {"type": "any"}}, 'tool_choice: found "required" without tools'),
        ({"stop_sequences": "a"}, "stop_sequences: found"),
        ({"max_tokens": None}, "max_tokens: found none"),
        ({"max_tokens": 0}, "max_tokens: found 0"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config: found"),
        ({"output_config": {"form": {}}}, "output_config: found"),
        ({"output_config": "high"}, "output_config: found"),
        ({"output_config": FORMAT, "stop_sequences": ["a"]}, "stop: found"),
        ({"mcp_servers": [{}]}, "mcp_servers: found"),
        ({"beams": 2}, "beams: found a key that this server does not know"),
    ],
)
def test_what_is_not_done_is_refused_by_name(body: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_message_request({**HEAD, "messages": ONE, **body}, DEFAULT)
    (fault,) = str(refused.value).splitlines()
    assert fault.startswith(said)
    assert json.loads(json.dumps(refused.value.message_body()))["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("config", "schema", "noted"),
    [
        ({}, None, []),
        ({"effort": "low"}, None, ["output_config"]),
        (FORMAT, {"type": "object"}, []),
        ({**FORMAT, "effort": "low"}, {"type": "object"}, ["output_config"]),
        ({"format": None}, None, []),
    ],
)
def test_a_format_is_the_samples_schema(config: Any, schema: Any, noted: list[str]) -> None:
    found = read_message_request({**HEAD, "messages": ONE, "output_config": config}, DEFAULT)
    assert found.sampling.json_schema == (None if schema is None else json.dumps(schema))
    assert list(found.notes) == noted


def test_fields_that_change_no_answer_are_noted_once() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "b", "is_error": True, "toolset_name": None}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result] * 1},
    ]
    tools = [{"name": "f", "input_schema": {}, "strict": True, "defer_loading": False}]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    asked = read_message_request({**HEAD, "messages": said, "tools": tools, "tool_choice": choice}, DEFAULT)
    assert sorted(asked.notes) == ["tool.strict", "tool_choice.disable_parallel_tool_use", "tool_result.is_error"]
    assert asked.notes["tool_result.is_error"].startswith("tool_result.is_error = true has no effect: ")


BLOCKS = {
    "text": anthropic.types.TextBlockParam,
    "thinking": anthropic.types.ThinkingBlockParam,
    "tool_use": anthropic.types.ToolUseBlockParam,
    "tool_result": anthropic.types.ToolResultBlockParam,
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_every_field_of_the_clients_blocks_is_read_noted_or_refused(kind: str) -> None:
    """Refused alone is what names a set of tools, which this server has not."""
    needed = {"text": "a", "thinking": "a", "id": "1", "name": "f", "input": {}, "tool_use_id": "1", "content": "a"}
    typed = BLOCKS[kind].__required_keys__ | BLOCKS[kind].__optional_keys__
    block = {name: needed.get(name, True) for name in typed - {"type", "toolset_name"}} | {"type": kind}
    role = "assistant" if kind in ("thinking", "tool_use") else "user"
    fault = ""
    try:
        read_message_request({**HEAD, "messages": [{"role": role, "content": [block]}]}, DEFAULT)
    except RequestError as error:
        fault = str(error)
    assert "unknown field" not in fault

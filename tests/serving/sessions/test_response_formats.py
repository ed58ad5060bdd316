"""Formats that requests ask of their answers: which are read, and where they are refused."""

import json
from typing import Any

import pytest

from rlcore.spi import SamplingParams, capabilities
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.requests import read_request
from rlcore_serve.sessions.response_requests import read_response_request
from rlcore_serve.sessions.session import Session, Sessions

from .chat_model import END, END_ID, ChatMl, Script, served, user

DEFAULT = SamplingParams(stop_token_ids=(END_ID,), stop_strings=("}",))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ABLE = frozenset({capabilities.STRUCTURED_OUTPUT, capabilities.TOP_K})


def chat(**options: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [user("hi")], **options}


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (FORMAT, SCHEMA),
    ],
)
def test_a_format_is_the_samples_schema(response_format: Any, schema: Any) -> None:
    """A schema ends its answer: the stop strings of the recipe are those of free texts."""
    found = read_request(chat(response_format=response_format), DEFAULT, is_chat=True)
    assert found.sampling.json_schema == (None if schema is None else json.dumps(schema))
    assert found.sampling.stop_strings == (DEFAULT.stop_strings if schema is None else ())
    assert not found.chooses_distribution


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ({"format": {"type": "text"}}, None),
        ({"format": {"type": "json_object"}}, {"type": "object"}),
        ({"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}, SCHEMA),
        ({"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}, "verbosity": "low"}, SCHEMA),
    ],
)
def test_the_responses_api_has_it_in_its_text(text: Any, schema: Any) -> None:
    found = read_response_request({"model": "policy", "input": "hi", "text": text}, DEFAULT)
    assert found.sampling.json_schema == (None if schema is None else json.dumps(schema))
    assert list(found.notes) == (["text"] if "verbosity" in text else [])


@pytest.mark.parametrize(
    "response_format",
    [
        "json",
        {},
        {"type": "xml"},
        {"type": "text", "json_schema": {}},
        {"type": "json_object", "schema": {}},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "answer"}},
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": "object"}},
        {"type": "json_schema", "json_schema": {"schema": {}, "unknown": 1}},
        {"type": "json_schema", "json_schema": {"schema": {}}, "unknown": 1},
    ],
)
def test_a_wrong_format_is_refused(response_format: Any) -> None:
    with pytest.raises(RequestError) as raised:
        read_request(chat(response_format=response_format), DEFAULT, is_chat=True)
    assert str(raised.value).startswith("response_format: found ")
    if isinstance(response_format, dict) and "json_schema" not in response_format:
        with pytest.raises(RequestError):
            read_response_request({"model": "policy", "input": "hi", "text": {"format": response_format}}, DEFAULT)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"tools": [TOOL]}, "response_format: found one beside tools"),
        ({"stop": ["."]}, "stop: found"),
        ({"ignore_eos": True}, "ignore_eos: found true"),
    ],
)
def test_what_leaves_the_format_no_room_is_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(RequestError) as raised:
        read_request(chat(response_format=FORMAT, **options), DEFAULT, is_chat=True)
    assert str(raised.value).startswith(found)
    read_request(chat(response_format={"type": "text"}, **options), DEFAULT, is_chat=True)
    read_request(chat(response_format=FORMAT, tools=[TOOL], tool_choice="none"), DEFAULT, is_chat=True)


class Sums(ChatMl):
    """A tokenizer with few characters."""

    def encode(self, text: str) -> list[int]:
        return [token if chr(token) in "0123456789+=" or token < 3 else 0 for token in super().encode(text)]


def prepared(session: Session, schema: Any = SCHEMA, opens: str = "", **options: Any) -> Any:
    """The request as the model prepares it, with these options of the model."""
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    request = chat(response_format=asked, chat_template_kwargs={"opens": opens}, **options.pop("request", {}))
    model = served(Script(f"{{}}{END}"), **{"capabilities": ABLE, **options})
    return model.prepare(session, read_request(request, model.sampling, is_chat=True))


def test_a_session_that_trains_needs_the_kept_tokens() -> None:
    """A schema leaves tokens out. Without a record of them a loss would take the sample for one of the whole distribution."""
    sessions = Sessions()
    with pytest.raises(RequestError) as raised:
        prepared(sessions.open())
    assert "rollout.top_k" in str(raised.value)
    for found in (
        prepared(sessions.open(), keeps_kept=True),
        prepared(sessions.open(), request={"record": False}),
        prepared(Session(token="", record=None)),
    ):
        assert json.loads(found.wanted[0].sampling.json_schema) == SCHEMA


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"capabilities": frozenset()}, "structured_output, which the generator cannot do"),
        ({"schema": {"enum": []}}, "Unsatisfiable"),
        ({"schema": {"type": "word"}}, "Invalid type"),
        ({"opens": "<think>\n"}, "response_format: found a prompt that ends in <think>"),
        ({"sampling": SamplingParams(stop_token_ids=(7,))}, "response_format: found the stop tokens [7]"),
        ({"tokenizer": Sums()}, "response_format: found a model without tokens for JSON"),
    ],
)
def test_what_cannot_be_answered_in_the_format_is_refused(options: dict[str, Any], found: str) -> None:
    with pytest.raises(RequestError) as raised:
        prepared(Session(token="", record=None), **options)
    assert found in str(raised.value)
    assert raised.value.status == 400

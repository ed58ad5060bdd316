"""Public forms of messages, calls and tools come to one form, or are refused by name."""

import base64
import json
from datetime import date

import numpy as np
import pytest

from rlcore.spi import DataError
from rlcore_text.chats.messages import read_arguments, read_messages, read_tools, thought_of

USER = {"role": "user", "content": "q"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": None, "n": 1}}}
TEXT = json.dumps(CALL["function"]["arguments"])
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}


def said(**fields):
    return {"role": "assistant", "content": None, **fields}


def with_arguments(value):
    return {"type": "function", "function": {"name": "f", "arguments": value}}


@pytest.mark.parametrize(
    ("message", "normal"),
    [
        ({"from": "human", "value": "q"}, USER),
        ({"from": "gpt", "value": "a"}, {"role": "assistant", "content": "a"}),
        ({"from": "observation", "value": "4"}, {"role": "tool", "content": "4"}),
        ({"role": "tool_response", "content": "4"}, {"role": "tool", "content": "4"}),
        ({"role": "human", "content": "q", "from": None, "value": None}, USER),
        ({"role": "model", "content": "a"}, {"role": "assistant", "content": "a"}),
        ({"from": "function_call", "value": json.dumps(CALL["function"])}, said(content="", tool_calls=[CALL])),
        ({"role": "tool_call", "content": json.dumps([CALL["function"]] * 2)}, said(content="", tool_calls=[CALL] * 2)),
        ({"role": "tool_call", "content": CALL["function"], "loss": False}, said(content="", tool_calls=[CALL], weight=0)),
        (said(content="a", tool_calls=""), said(content="a")),
        (said(content="a", tool_calls="null"), said(content="a")),
        (said(tool_calls=[with_arguments("null")]), said(content="", tool_calls=[with_arguments({})])),
        ({"role": "user", "content": [{"type": "input_text", "text": "q"}]}, USER),
        (
            {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}, "image": None}]},
            USER,
        ),
        (said(content=[{"type": "output_text", "text": "a", "annotations": []}]), said(content="a")),
        (said(content=[{"type": "refusal", "refusal": "no"}]), said(content="no")),
        (said(refusal="no"), said(content="no")),
        (said(content="a", refusal=None, audio=None, function_call=None, tool_calls=[]), said(content="a")),
        (said(tool_calls=[CALL]), said(content="", tool_calls=[CALL])),
        (said(tool_calls=[with_arguments(TEXT)]), said(content="", tool_calls=[CALL])),
        (said(tool_calls=json.dumps([with_arguments(TEXT)])), said(content="", tool_calls=[CALL])),
        (said(tool_calls=[CALL["function"]]), said(content="", tool_calls=[CALL])),
        (said(tool_calls=[{"index": 0, **CALL}]), said(content="", tool_calls=[CALL])),
        (said(tool_calls=[{"id": "c", **CALL}]), said(content="", tool_calls=[{"id": "c", **CALL}])),
        (said(tool_calls=[with_arguments("")]), said(content="", tool_calls=[with_arguments({})])),
        (said(function_call={"name": "f", "arguments": TEXT}), said(content="", tool_calls=[CALL])),
        (said(reasoning_content="r"), said(content="", reasoning_content="r")),
        (said(content="a", thinking="r", reasoning="r"), said(content="a", thinking="r", reasoning="r")),
        (said(content="a", weight=0), said(content="a", weight=0)),
        (said(content="a", loss=False), said(content="a", weight=0)),
        (said(content="a", loss_scale=0.0), said(content="a", weight=0)),
        (said(content="a", loss_scale=1.0), said(content="a")),
        (said(content="a", train_on_turn=False), said(content="a", train_on_turn=False)),
        (said(content="a", train=True, weight=1.0), said(content="a")),
        (USER | {"weight": 0, "loss": None}, USER),
        (said(content="a", prefix=True), said(content="a")),
        (USER | {"name": "n", "annotations": [1], "mood": "calm"}, USER | {"name": "n", "mood": "calm"}),
        (
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,YWI=", "detail": "low"}}],
            },
            {"role": "user", "content": [{"type": "image", "image": b"ab"}]},
        ),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "file:///a%20b.png"}]},
            {"role": "user", "content": [{"type": "image", "image": "/a b.png"}]},
        ),
        (
            {"role": "user", "content": [{"type": "image", "base64": base64.b64encode(b"ab").decode()}]},
            {"role": "user", "content": [{"type": "image", "image": b"ab"}]},
        ),
    ],
)
def test_public_forms_are_one_form_which_reads_as_itself(message, normal):
    normal = {name: value for name, value in normal.items() if value is not None}
    (read,) = read_messages([message])
    assert read == normal
    assert read_messages([read]) == [read]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("a", "message 1 that is str 'a'"),
        ({"content": "a"}, "whose 'role' is NoneType"),
        ({"from": "narrator", "value": "a"}, "whose 'from' is 'narrator'; expected one of human, gpt"),
        ({**USER, "from": "gpt"}, "both 'role' and 'from', which contradict"),
        ({**USER, "value": "other"}, "both 'content' and 'value', which contradict"),
        ({"from": "function_call", "value": "add(2)"}, "with calls that are no JSON"),
        ({"role": "tool_call", "content": "3"}, "whose call 0 has the form 3"),
        ({"role": "user"}, "whose 'content' is NoneType"),
        ({"role": "tool", "content": {"a": 1}}, "whose 'content' is dict"),
        (said(content="a", refusal="b"), "both 'content' and 'refusal'"),
        (said(tool_calls=[CALL], function_call=CALL["function"]), "both 'tool_calls' and 'function_call'"),
        (said(tool_calls="[{"), "'tool_calls' that are no JSON"),
        (said(tool_calls=[with_arguments("{x")]), "call 0 has arguments that are no JSON"),
        (said(tool_calls=[with_arguments('{"a": NaN}')]), "NaN is no JSON value"),
        (said(tool_calls=[with_arguments("[1]")]), r"arguments that are list '\[1\]'; expected a JSON object"),
        (said(tool_calls=[with_arguments(json.dumps(TEXT))]), "arguments that are str"),
        (said(tool_calls=[with_arguments('{"a": "\\ud800"}')]), "half a character"),
        (said(tool_calls=[with_arguments({"a": "\ud800"})]), "half a character"),
        (said(tool_calls=[with_arguments({"a": float("nan")})]), "call 0 has arguments, which JSON cannot hold"),
        (said(tool_calls=[with_arguments({"a": [{"b": date(2020, 1, 1)}]})]), "arguments, which JSON cannot hold: .*date"),
        (said(tool_calls=[{**CALL, "type": "custom"}]), "the type 'custom'; expected 'function'"),
        (said(tool_calls=[{**CALL, "strict": 1}]), "call 0 has the unknown field 'strict'"),
        (said(tool_calls=[{"function": {**CALL["function"], "parameters": {"a": 1}}}]), "the unknown field 'parameters'"),
        (said(tool_calls=[{"function": {"arguments": {}}}]), "expected one with name and arguments"),
        (said(content="a", reasoning="r", thinking="s"), "different texts as 'reasoning' and 'thinking'"),
        (said(content="a", reasoning=["r"]), "whose 'reasoning' is list"),
        (said(content="a", weight=0.5), "whose 'weight' is 0.5; expected 0, 1"),
        (said(content="a", weight=1, loss=False), "'weight' and 'loss', which contradict each other"),
        (said(content="a", loss_scale=0.3), "whose 'loss_scale' is 0.3; expected 0, 1"),
        (USER | {"train": True}, "of the role 'user' whose 'train' is True"),
        ({"from": "assitant", "value": "a"}, "whose 'from' is 'assitant'; expected one of human"),
        (said(content="a", weight=np.array([1, 0])), "with values that are no JSON .ValueError: The truth value"),
        (said(content="a", thinking=np.array(["a", "b"])), "with values that are no JSON .ValueError"),
        (said(tool_calls=[{**CALL, "strict": False}]), "call 0 has the unknown field 'strict'"),
        (USER | {"prefix": True}, "with 'prefix'"),
        (USER | {"tool_calls": [CALL]}, "of the role 'user' with 'tool_calls', which only the assistant's"),
        (USER | {"function_call": CALL["function"]}, "of the role 'user' with 'tool_calls'"),
        ({"role": "tool", "content": "4", "thinking": "r"}, "of the role 'tool' with 'thinking'"),
        (said(content="a", name=3), "whose 'name' is int"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "min_pixels": 4}]},
            "the unknown field 'min_pixels': scale",
        ),
        ({"role": "user", "content": [{"type": "image", "image": "a", "url": "b"}]}, "'image' and 'url'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "https://a/b.png"}]}, "nothing is downloaded"),
        ({"role": "user", "content": [{"type": "image", "base64": "?"}]}, "no base64"),
        ({"role": "user", "content": [{"type": "image", "image": {"bytes": b"a", "width": 3}}]}, "unknown field 'width'"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "hidden": False}]}, "the unknown field 'hidden'"),
        ({"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, "as part 0, not"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_message(message, fault):
    with pytest.raises(DataError, match=fault) as raised:
        read_messages([USER, message])
    assert str(raised.value).startswith("message 1 ")


def test_calls_that_are_messages_are_one_turn_with_what_was_said_before_them():
    calls = [{"role": "tool_call", "content": json.dumps(CALL["function"])}] * 2
    result = {"role": "tool_response", "content": "4"}
    assert read_messages([USER, said(content="a"), *calls, result, *calls]) == [
        USER,
        said(content="a", tool_calls=[CALL] * 2),
        {"role": "tool", "content": "4"},
        said(content="", tool_calls=[CALL] * 2),
    ]


@pytest.mark.parametrize(
    ("before", "call", "field"),
    [({}, {"loss": False}, "weight"), ({"weight": 0}, {}, "weight"), ({}, {"thinking": "t"}, "thinking")],
)
def test_calls_that_are_messages_are_learned_and_thought_as_their_turn(before, call, field):
    written = {"role": "tool_call", "content": CALL["function"], **call}
    with pytest.raises(DataError, match=f"message 2.*{field!r}"):
        read_messages([USER, said(content="a", **before), written])
    same = {"weight": 0, "thinking": "t"}
    turn = said(content="a", tool_calls=[CALL], **same)
    assert read_messages([USER, said(content="a", **same), written | {"loss": False, "thinking": "t"}]) == [USER, turn]
    assert read_messages([USER, said(content="a", thinking="t"), written | {"loss": 1, "thinking": ""}])[1]["thinking"] == "t"


def test_only_a_prompt_may_begin_an_answer():
    begun = [USER, said(content="a", prefix=True)]
    assert read_messages(begun)[-1] == said(content="a")
    with pytest.raises(DataError, match="message 1 with 'prefix'"):
        read_messages(begun, may_begin=False)


def test_a_client_is_free_to_write_arguments_that_are_no_json():
    (read,) = read_messages([said(tool_calls=[with_arguments("{x")])], keeps_unreadable=True)
    assert read["tool_calls"] == [with_arguments("{x")]
    assert read_messages([read], keeps_unreadable=True) == [read]


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        [TOOL["function"]],
        [{"type": "function", **TOOL["function"]}],
        [{**TOOL, "function": {**TOOL["function"], "parameters": json.dumps(SCHEMA)}}],
    ],
)
def test_tools_have_one_form(tools):
    assert read_tools(tools) == (TOOL,)
    assert read_tools(read_tools(tools)) == (TOOL,)


def test_no_tools_and_no_arguments_are_none():
    assert [read_tools(value) for value in (None, [], {}, "", "null", "[]")] == [()] * 6
    assert [read_arguments(value) for value in (None, "", "null")] == [{}] * 3
    assert thought_of(USER) == ""


@pytest.mark.parametrize(
    ("tools", "fault"),
    [
        ("search", "tools that are no JSON"),
        ({"name": "f"}, "expected a list"),
        (["search"], "tool 0 that are no JSON"),
        ([{"type": "web_search"}], "tool 0 as"),
        ([{"type": "function", "function": {}}], "tool 0 as"),
        ([{"name": "f", "input_schema": SCHEMA}], "the field 'input_schema': write it as `parameters`"),
        ([{**TOOL, "extra": 1}], "unknown field 'extra'"),
        ([{"name": "f", "parameters": [1]}], "expected a JSON schema"),
        ([{"name": "f", "parameters": {"a": {1}}}], "JSON cannot hold"),
    ],
)
def test_tools_that_are_none_are_refused(tools, fault):
    with pytest.raises(DataError, match=fault):
        read_tools(tools)

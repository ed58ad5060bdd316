"""Turns in which a policy calls the tools of an episode, rightly and wrongly."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlcore.spi import FinishReason, Observation, Tool, ToolCall, Turn

UNREAD = '{"name": "look", "arguments": {'
_VALUES: Mapping[str, Any] = {
    "string": "a",
    "integer": 1,
    "number": 0.5,
    "boolean": True,
    "array": [],
    "object": {},
    "null": None,
}


def tool_turns(tools: Sequence[Tool]) -> dict[str, Turn]:
    """Turns by what they are: each tool with arguments of its schema, without any, and with others of wrong types; a tool that
    there is not; a call that could not be read; and several calls at once."""
    turns: dict[str, Turn] = {}
    for tool in tools:
        name, schema = tool["function"]["name"], tool["function"].get("parameters") or {}
        fitting = _fitting(schema)
        turns[f"a call of {name}"] = _turn(_call(0, name, fitting))
        turns[f"a call of {name} without arguments"] = _turn(_call(0, name, {}))
        turns[f"a call of {name} with arguments of wrong types"] = _turn(_call(0, name, {key: ["?"] for key in fitting}))
        turns[f"two calls of {name}"] = _turn(_call(0, name, fitting), _call(1, name, fitting))
    turns["a call of a tool that there is not"] = _turn(_call(0, "no_such_tool", {"a": 1}))
    turns["a call that could not be read"] = _turn(ToolCall(id="call_0", name="", text=UNREAD, error="Expecting value"))
    return turns


def check_tools(observation: Observation) -> None:
    """Fail where a run would refuse the tools of an observation."""
    if not observation.tools:
        return
    assert observation.messages is not None, "an observation has tools and no messages; expected messages, which show them"
    for tool in observation.tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        expected = '{"type": "function", "function": {"name": …, "parameters": …}}'
        assert is_named, f"found the tool {tool!r:.80}; expected {expected}"
        try:
            json.dumps(tool, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            raise AssertionError(f"the tool {tool!r:.80} is no JSON: {error}") from error


def _call(number: int, name: str, arguments: Mapping[str, Any]) -> ToolCall:
    text = json.dumps({"name": name, "arguments": arguments})
    return ToolCall(id=f"call_{number}", name=name, arguments=arguments, text=text)


def _turn(*calls: ToolCall) -> Turn:
    text = "\n".join(call.text for call in calls)
    tokens = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    return Turn(text=text, tokens=tokens, finish_reason=FinishReason.STOP, content="", tool_calls=calls)


def _fitting(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that a JSON schema of an object describes, as far as a few lines tell."""
    return {name: _value(part) for name, part in (schema.get("properties") or {}).items()}


def _value(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    return _fitting(schema) if kind == "object" else _VALUES.get(kind, "a")

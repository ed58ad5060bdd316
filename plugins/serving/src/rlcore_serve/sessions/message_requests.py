"""Requests of Anthropic's Messages API, put into the form of a chat."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.spi import SamplingParams
from rlcore_serve.sessions.bounds import require_bounded
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.request_keys import looked_up, shown
from rlcore_serve.sessions.requests import AnswerRequest, read_as_chat
from rlcore_serve.sessions.response_formats import as_chat, format_fault

_SAME = ("model", "messages", "max_tokens", "temperature", "top_k", "top_p", "stream", "chat_template_kwargs", "record")
"""Keys that a chat reads in the same way; `messages` after they are put into its form."""
_BLOCKS: Mapping[str, Mapping[str, type]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str},
}
"""Fields of each block of a message that have to be there."""
_NO_EFFECT: Mapping[str, tuple[str, ...]] = {
    "text": ("cache_control",),
    "thinking": ("signature",),
    "tool_use": ("cache_control", "caller"),
    "tool_result": ("content", "cache_control"),
}
"""Further fields that are read, or that change no answer."""
_IGNORED: Mapping[tuple[str, str], str] = {
    ("text", "citations"): "the model reads the text alone",
    ("tool_result", "is_error"): "the model reads the content alone, which should say it",
    ("tool_choice", "disable_parallel_tool_use"): "an answer may have several calls all the same",
    ("tool", "strict"): "arguments are sampled freely",
}
"""Fields that are ignored where they have a value, by the object that has them, with the note for the log."""
_TOOL_KEYS = (
    *("type", "name", "description", "input_schema"),
    *("cache_control", "strict", "input_examples", "allowed_callers", "eager_input_streaming"),
)
_CHOICE_KEYS = ("type", "name", "disable_parallel_tool_use")
_CHOICES = ("auto", "any", "tool", "none")


def read_message_request(body: object, default: SamplingParams) -> AnswerRequest:
    """Return what a request's JSON asks for. RequestError with status 400, and all that is wrong, where anything is."""
    if not isinstance(body, dict):
        raise RequestError(400, f"found a {type(body).__name__} as the request's body; expected a JSON object")
    values = {name: value for name, value in body.items() if value is not None}
    require_bounded({**values, "stop": values.get("stop_sequences")})
    problems, notes = looked_up(values, "messages")
    chat: dict[str, Any] = {name: values[name] for name in _SAME if name in values}
    messages: list[dict[str, Any]] = []
    problems += [*_system(values.get("system"), messages), *_all_messages(values.get("messages"), messages, notes)]
    chat["messages"] = messages or [{"role": "user", "content": ""}]
    tools, stops = values.get("tools", []), values.get("stop_sequences", [])
    problems += [*_wrong_tools(tools), *_wrong_choice(values.get("tool_choice"))]
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        problems.append(f"stop_sequences: found {shown(stops)}; expected a list of texts, none of them empty")
    output = values.get("output_config")
    if isinstance(output, dict) and output.get("format") is not None:
        chat["response_format"] = as_chat(output["format"])
        if (fault := format_fault(chat["response_format"])) is not None:
            del chat["response_format"]
            problems.append(f"output_config: {fault} as its format")
    if "max_tokens" not in values:
        problems.append("max_tokens: found none; expected a whole number, at least 1")
    if not problems:
        chat |= {"tools": [_chat_tool(tool) for tool in tools], "tool_choice": _chat_choice(values.get("tool_choice"))}
        chat["stop"] = stops
        for tool in tools:
            notes |= _ignored("tool", tool)
        notes |= _ignored("tool_choice", values.get("tool_choice") or {})
    return read_as_chat(chat, default, problems, notes)


def _system(system: Any, messages: list[dict[str, Any]]) -> Iterator[str]:
    """Add the system's message, and yield what is wrong with it."""
    text = "" if system is None else _text(system)
    if text is None:
        yield f"system: found {shown(system)}; expected text, or a list of blocks of text"
    elif text:
        messages.append({"role": "system", "content": text})


def _all_messages(found: Any, messages: list[dict[str, Any]], notes: dict[str, str]) -> Iterator[str]:
    """Add the messages in the form of a chat, and notes on what is ignored, and yield what is wrong with them."""
    if not isinstance(found, list) or not found:
        yield f"messages: found {shown(found)}; expected a list of at least one message"
        return
    for number, message in enumerate(found):
        fault = _message(message, messages, notes)
        if fault is not None:
            yield f"messages[{number}]: found {fault}"


def _message(message: Any, messages: list[dict[str, Any]], notes: dict[str, str]) -> str | None:
    """Add one message. Results of tools become messages of their own, before the rest. Return what is wrong."""
    role, content = (message.get(name) for name in ("role", "content")) if isinstance(message, dict) else (None, None)
    if role not in ("user", "assistant", "system"):
        return f"{shown(message)}; expected an object with the role user or assistant"
    if unknown := set(message) - {"role", "content"}:
        return f"the unknown field {min(unknown)!r:.40}; leave it out"
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        return f"the content {shown(content)}; expected text, or a list of blocks"
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        of_role = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use")}.get(role, ("text",))
        if kind not in of_role:
            return f"the block {shown(block)}; expected one of {', '.join(of_role)} in a message of the role {role}"
        if bad := [name for name, tp in _BLOCKS[kind].items() if not isinstance(block.get(name), tp)]:
            return f"a block {kind} with {bad[0]} {shown(block.get(bad[0]))}; expected {_BLOCKS[kind][bad[0]].__name__}"
        ignored = {name for of, name in _IGNORED if of == kind}
        if unread := _given(block) - {"type", *_BLOCKS[kind], *_NO_EFFECT[kind], *ignored}:
            return f"a block {kind} with the unknown field {min(unread)!r:.40}; leave it out"
        notes |= _ignored(kind, block)
        if kind == "tool_result":
            if (text := _text(block.get("content", ""))) is None:
                return f"a block tool_result with the content {shown(block.get('content'))}; expected text, or blocks of text"
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": text})
    by_kind = {kind: [block for block in blocks if block["type"] == kind] for kind in _BLOCKS}
    text = "".join(block["text"] for block in by_kind["text"])
    calls = [_chat_call(block) for block in by_kind["tool_use"]]
    thought = "".join(block["thinking"] for block in by_kind["thinking"])
    if text or calls or thought or not by_kind["tool_result"]:
        said: dict[str, Any] = {"role": role, "content": text}
        messages.append(said | ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": thought} if thought else {}))
    return None


def _given(found: Mapping[str, Any]) -> set[str]:
    """Return the names of an object's fields that have a value."""
    return {name for name, value in found.items() if value is not None and value is not False}


def _ignored(of: str, found: Mapping[str, Any]) -> dict[str, str]:
    """Return a note by name for each field of an object that has a value and is ignored."""
    fields = {name: note for (owner, name), note in _IGNORED.items() if owner == of and found.get(name)}
    return {f"{of}.{name}": f"{of}.{name} = {shown(found[name])} has no effect: {note}" for name, note in fields.items()}


def _text(content: Any) -> str | None:
    """Return a text, or that of a list of blocks of text; None where it is something else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(one, dict) and one.get("type") == "text" for one in content):
        return None
    texts = [one.get("text") for one in content]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


def _chat_call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
    return {"id": block["id"], "type": "function", "function": function}


def _wrong_tools(tools: Any) -> Iterator[str]:
    if not isinstance(tools, list):
        yield f"tools: found {shown(tools)}; expected a list of tools"
        return
    for number, tool in enumerate(tools):
        is_own = isinstance(tool, dict) and tool.get("type", "custom") == "custom" and isinstance(tool.get("name"), str)
        if not is_own or _given(tool) - {*_TOOL_KEYS}:
            yield f'tools[{number}]: found {shown(tool)}; expected {{"name": …, "description": …, "input_schema": …}}'


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": "name", "description": "description", "parameters": "input_schema"}
    function = {name: tool[own] for name, own in named.items() if tool.get(own) is not None}
    return {"type": "function", "function": function}


def _wrong_choice(choice: Any) -> Iterator[str]:
    if choice is not None and not (isinstance(choice, dict) and choice.get("type") in _CHOICES):
        yield f"tool_choice: found {shown(choice)}; expected an object of the type {', '.join(_CHOICES)}"
    elif choice is not None and (unknown := _given(choice) - {*_CHOICE_KEYS}):
        yield f"tool_choice: found the unknown field {min(unknown)!r:.40}; leave it out"


def _chat_choice(choice: Mapping[str, Any] | None) -> Any:
    """Return the `tool_choice` of a chat."""
    kind = "auto" if choice is None else choice["type"]
    if kind == "tool":
        assert choice is not None
        return {"type": "function", "function": {"name": choice.get("name")}}
    return "required" if kind == "any" else kind

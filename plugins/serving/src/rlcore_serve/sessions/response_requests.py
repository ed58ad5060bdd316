"""Requests of OpenAI's Responses API, put into the form of a chat."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import define, field

from rlcore.spi import SamplingParams
from rlcore_serve.sessions.bounds import require_bounded
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.request_keys import IN_CHAT, INCLUDED, looked_up, shown
from rlcore_serve.sessions.requests import AnswerRequest, read_as_chat
from rlcore_serve.sessions.response_formats import as_chat, format_fault
from rlcore_serve.sessions.response_reply import FIRST_CALL
from rlcore_text.chats.messages import has_value

_LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text")
_SHOWN = ("name", "description", "parameters")
"""Keys of a tool that chat templates show."""
_TOOL = {"type", "strict", *_SHOWN}
_ITEMS = "message, function_call, function_call_output"
_FIELDS: Mapping[str, frozenset[str]] = {
    "message": frozenset({"type", "role", "content", "id", "status", "phase"}),
    "function_call": frozenset({"type", "name", "arguments", "call_id", "id", "status"}),
    "function_call_output": frozenset({"type", "output", "call_id", "id", "status", "name"}),
    "reasoning": frozenset({"type", "id", "status", "summary", "content", "encrypted_content"}),
    "part": frozenset({"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"}),
}
"""Fields of items of the input, and of the parts of their texts, that are read or have no effect."""


def read_response_request(body: object, default: SamplingParams) -> AnswerRequest:
    """Return what a request's JSON asks for. RequestError with status 400, and all that is wrong, where anything is."""
    if not isinstance(body, dict):
        raise RequestError(400, f"found a {type(body).__name__} as the request's body; expected a JSON object")
    values = {name: value for name, value in body.items() if value is not None}
    require_bounded(values)
    problems, notes = looked_up(values, "responses")
    problems += _wrong(values)
    chat = {name: value for name, value in values.items() if name in IN_CHAT}
    read = _Items()
    problems += read.take_all(values)
    if type(values.get("max_output_tokens")) is int:
        chat["max_completion_tokens"] = max(values["max_output_tokens"], 1)
    text, included = values.get("text"), values.get("include", [])
    if isinstance(text, dict) and text.get("format") is not None:
        chat["response_format"] = as_chat(text["format"])
        if (fault := format_fault(chat["response_format"])) is not None:
            del chat["response_format"]
            problems.append(f"text: {fault} as its format")
    chat |= {"messages": read.messages or [{"role": "user", "content": ""}]}
    chat["logprobs"] = bool(values.get("top_logprobs")) or (isinstance(included, list) and _LOGPROBS in included)
    tools = values.get("tools", [])
    problems += _wrong_tools(tools)
    if not problems:
        chat |= {"tools": [_chat_tool(tool) for tool in tools], "tool_choice": values.get("tool_choice")}
    return read_as_chat(chat, default, problems, notes)


@define
class _Items:
    """The input as the messages of a chat."""

    messages: list[dict[str, Any]] = field(factory=list)
    thought: str = ""
    """The thought of the answer that comes next."""

    def take_all(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Add the messages that a request's `instructions` and `input` are. Yield what is wrong with them."""
        instructions, items = values.get("instructions"), values.get("input")
        if instructions is not None and not isinstance(instructions, str):
            yield f"instructions: found {shown(instructions)}; expected text"
        elif instructions:
            self.messages.append({"role": "system", "content": instructions})
        if isinstance(items, str):
            self.messages.append({"role": "user", "content": items})
        elif isinstance(items, list) and items:
            for number, item in enumerate(items):
                fault = self._take(item)
                if fault is not None:
                    yield f"input[{number}]: {fault}"
        else:
            yield f"input: found {shown(items)}; expected text, or a list of at least one item"

    def _take(self, item: Any) -> str | None:
        """Add an item. Return what is wrong with it."""
        kinds: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._output,
            "reasoning": self._reasoning,
        }
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            return f"found {shown(item)}; expected an item of the type {_ITEMS} or reasoning"
        return _unknown_field(item, kind) or kinds[kind](item)

    def _message(self, item: Mapping[str, Any]) -> str | None:
        text, role = _text(item.get("content")), item.get("role")
        if not isinstance(role, str):
            return f"found the role {shown(role)}; expected text"
        if text is None:
            return f"found the content {shown(item.get('content'))}; expected text, or parts of text alone"
        self.messages.append({"role": role, "content": text, **self._take_thought(role)})
        return None

    def _reasoning(self, item: Mapping[str, Any]) -> str | None:
        """A thought begins an answer, whose message or call follows."""
        if item.get("encrypted_content"):
            return "found reasoning with encrypted_content; expected its text as content: this server encrypts none"
        parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
            return f"found {shown(item)}; expected parts of text as content or summary"
        self.thought += "".join(map(str, texts))
        return None

    def _take_thought(self, role: str) -> dict[str, str]:
        thought, self.thought = self.thought, ""
        return {"reasoning_content": thought} if thought and role == "assistant" else {}

    def _call(self, item: Mapping[str, Any]) -> str | None:
        """A call belongs to the answer before it, unless it begins one."""
        name, arguments, call_id = (item.get(key) for key in ("name", "arguments", "call_id"))
        if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(call_id, str)):
            return f"found {shown(item)}; expected the texts name, arguments and call_id"
        is_new = self.thought or not self.messages or self.messages[-1]["role"] != "assistant"
        if is_new or call_id.startswith(f"{FIRST_CALL}_"):
            self.messages.append({"role": "assistant", "content": None, **self._take_thought("assistant")})
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        return None

    def _output(self, item: Mapping[str, Any]) -> str | None:
        text, call_id = _text(item.get("output")), item.get("call_id")
        if text is None or not isinstance(call_id, str):
            return f"found {shown(item)}; expected call_id, and as output text, or parts of text alone"
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        return None


def _unknown_field(item: Mapping[str, Any], kind: str) -> str | None:
    """Return the fault of an item with a field that has a value and that nothing reads, in its parts too; None without one."""
    content = item.get("content", item.get("output"))
    parts = [part for part in content if isinstance(part, dict)] if kind != "reasoning" and isinstance(content, list) else []
    for one, known in ((item, _FIELDS[kind]), *((part, _FIELDS["part"]) for part in parts if part.get("type") in _TEXTS)):
        for name, value in one.items():
            if name not in known and value is not False and has_value(value):
                return f"found the unknown field {name!r:.40}; leave it out"
    return None


def _text(content: Any) -> str | None:
    """The text of a message; None where there is something else in it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part for part in content if isinstance(part, dict) and part.get("type") in _TEXTS]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else None


def _wrong(values: Mapping[str, Any]) -> Iterator[str]:
    limit = values.get("max_output_tokens", 1)
    if type(limit) is not int or limit < 1:
        yield f"max_output_tokens: found {shown(limit)}; expected a whole number, at least 1"
    include = values.get("include", [])
    if not isinstance(include, list) or not all(one in INCLUDED for one in include):
        yield f"include: found {shown(include)}; expected a list of {', '.join(INCLUDED)}"


def _wrong_tools(tools: Any) -> Iterator[str]:
    if not isinstance(tools, list):
        yield f"tools: found {shown(tools)}; expected a list of tools"
        return
    for number, tool in enumerate(tools):
        is_function = isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)
        if not is_function or {key for key, value in tool.items() if value not in (None, False)} - _TOOL:
            expected = '{"type": "function", "name": …, "parameters": …}'
            yield f"tools[{number}]: found {shown(tool)}; expected {expected}"


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in _SHOWN if tool.get(name) is not None}
    return {"type": "function", "function": function}

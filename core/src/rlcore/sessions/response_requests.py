"""Requests of OpenAI's Responses API, put into the form of a chat."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import define, field

from rlcore.sessions.errors import RequestError
from rlcore.sessions.requests import AnswerRequest, read_request
from rlcore.sessions.response_reply import FIRST_CALL
from rlcore.spi import SamplingParams

_LOGPROBS = "message.output_text.logprobs"
_AS_IN_CHAT = {
    "chat_template_kwargs",
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "record",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "temperature",
    "tool_choice",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
}
_OWN = {"input", "instructions", "tools", "max_output_tokens", "include"}
_ONLY: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "stream": (False,),
    "text": ({"format": {"type": "text"}}, {}),
    "truncation": ("disabled",),
}
"""Keys of which the server does only these values, besides null."""
_TEXTS = ("input_text", "output_text", "text")
_TOOL = {"type", "name", "description", "parameters", "strict"}
_ITEMS = "message, function_call, function_call_output"


def read_response_request(body: object, default: SamplingParams) -> AnswerRequest:
    """Return what a request's JSON asks for. RequestError with status 400, and all that is wrong, where anything is."""
    if not isinstance(body, dict):
        raise RequestError(400, f"found a {type(body).__name__} as the request's body; expected a JSON object")
    values = {name: value for name, value in body.items() if value is not None}
    problems = list(_wrong(values))
    chat = {name: value for name, value in values.items() if name in _AS_IN_CHAT}
    read = _Items()
    problems += read.take_all(values)
    if type(values.get("max_output_tokens")) is int:
        chat["max_completion_tokens"] = max(values["max_output_tokens"], 1)
    chat |= {"messages": read.messages or [{"role": "user", "content": ""}], "logprobs": values.get("include") == [_LOGPROBS]}
    tools = values.get("tools", [])
    problems += _wrong_tools(tools)
    if not problems and tools:
        chat["tools"] = [_chat_tool(tool) for tool in tools]
    try:
        request = read_request(chat, default, is_chat=True)
    except RequestError as error:
        problems.append(str(error))
    if problems:
        raise RequestError(400, "\n".join(problems))
    return request


@define
class _Items:
    """The input as the messages of a chat."""

    messages: list[dict[str, Any]] = field(factory=list)

    def take_all(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Add the messages that a request's `instructions` and `input` are. Yield what is wrong with them."""
        instructions, items = values.get("instructions"), values.get("input")
        if instructions is not None and not isinstance(instructions, str):
            yield f"instructions: found {_shown(instructions)}; expected text"
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
            yield f"input: found {_shown(items)}; expected text, or a list of at least one item"

    def _take(self, item: Any) -> str | None:
        """Add an item. Return what is wrong with it."""
        kinds: Mapping[str, Callable[[Mapping[str, Any]], str | None]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._output,
            "reasoning": _reasoning_fault,
        }
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            return f"found {_shown(item)}; expected an item of the type {_ITEMS} or reasoning"
        return kinds[kind](item)

    def _message(self, item: Mapping[str, Any]) -> str | None:
        text, role = _text(item.get("content")), item.get("role")
        if not isinstance(role, str):
            return f"found the role {_shown(role)}; expected text"
        if text is None:
            return f"found the content {_shown(item.get('content'))}; expected text, or parts of text alone"
        self.messages.append({"role": role, "content": text})
        return None

    def _call(self, item: Mapping[str, Any]) -> str | None:
        """A call belongs to the answer before it, unless it begins one."""
        name, arguments, call_id = (item.get(key) for key in ("name", "arguments", "call_id"))
        if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(call_id, str)):
            return f"found {_shown(item)}; expected the texts name, arguments and call_id"
        if not self.messages or self.messages[-1]["role"] != "assistant" or call_id.startswith(f"{FIRST_CALL}_"):
            self.messages.append({"role": "assistant", "content": None})
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self.messages[-1].setdefault("tool_calls", []).append(call)
        return None

    def _output(self, item: Mapping[str, Any]) -> str | None:
        text, call_id = _text(item.get("output")), item.get("call_id")
        if text is None or not isinstance(call_id, str):
            return f"found {_shown(item)}; expected call_id, and as output text, or parts of text alone"
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
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


def _reasoning_fault(item: Mapping[str, Any]) -> str | None:
    said = [name for name in ("summary", "content", "encrypted_content") if item.get(name)]
    if not said:
        return None
    return f"found reasoning with {said[0]}; expected none: answers of this server have all that was said in their text"


def _wrong(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if name in _ONLY:
            if value not in _ONLY[name]:
                expected = json.dumps(_ONLY[name][0])
                yield f"{name}: found {_shown(value)}; expected {expected}, which is all that this server does"
        elif name in ("previous_response_id", "conversation"):
            yield f"{name}: found {_shown(value)}; expected the whole conversation as input: this server keeps none"
        elif name not in _AS_IN_CHAT | _OWN:
            yield f"{name}: found a key that this server does not know; leave it out"
    limit = values.get("max_output_tokens", 1)
    if type(limit) is not int or limit < 1:
        yield f"max_output_tokens: found {_shown(limit)}; expected a whole number, at least 1"
    include = values.get("include", [])
    if include not in ([], [_LOGPROBS]):
        yield f"include: found {_shown(include)}; expected {json.dumps([_LOGPROBS])} or none"


def _wrong_tools(tools: Any) -> Iterator[str]:
    if not isinstance(tools, list):
        yield f"tools: found {_shown(tools)}; expected a list of tools"
        return
    for number, tool in enumerate(tools):
        is_function = isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)
        if not is_function or tool.keys() - _TOOL:
            expected = '{"type": "function", "name": …, "parameters": …}'
            yield f"tools[{number}]: found {_shown(tool)}; expected {expected}"


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    function.pop("strict", None)  # whether calls must fit the schema: templates do not show it
    return {"type": "function", "function": function}


def _shown(value: object) -> str:
    return f"{json.dumps(value, ensure_ascii=False, default=str):.60}"

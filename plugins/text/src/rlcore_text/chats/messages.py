"""Reads chat messages, calls of tools and tools: each public form becomes one form.

Data sets, environments, sessions and reward models all read messages here. A message that was read has its content as text or
parts, and the arguments of its calls as objects. It has `weight` 0 where it is not learned. A message that cannot be read is a
DataError, whose text completes a sentence that begins with "found".
"""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from rlcore.schema.file_limits import unique_keys
from rlcore.schema.printable import lone_surrogate
from rlcore.spi import DataError, Message, Tool
from rlcore_text.chats.images import content_fault, image_source
from rlcore_text.chats.public_fields import SLIP, instead_of, names_of, synonyms

ASSISTANT = "assistant"
THOUGHTS = synonyms("message", "reasoning_content")
"""Names of a message's field for the thought before an answer. A chat template reads at most one of them."""
IN_LOSS = synonyms("message", "weight")
"""Names of a message's field that includes an answer in the loss, or excludes it."""
OWN = frozenset({"role", "content", "weight", "name", "tool_call_id", "tool_calls", *THOUGHTS})
"""Fields of a message in the form of `read_message`. Only the chat template can use any other field."""
_ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), ASSISTANT),
    **dict.fromkeys(("observation", "tool_response"), "tool"),
}
"""OpenAI's role for each role of ShareGPT, LLaMA-Factory and ms-swift."""
_CALLS = ("function_call", "tool_call")
"""Roles of ShareGPT and ms-swift for a message whose content is the JSON text of calls."""
_READ = {"role", "content", "from", "value", "tool_calls", "function_call", "refusal", "prefix", *IN_LOSS}
_DROPPED = {"annotations"}
_IMAGES = ("image", "image_url", "input_image")
_TEXTS = ("text", "input_text", "output_text", "refusal")
_TOOL = '{"type": "function", "function": {"name": …, "parameters": …}}'


def read_messages(value: object, *, keeps_unreadable: bool = False, may_begin: bool = True) -> list[Message]:
    """Read the messages of a chat, whose last one `may_begin` an answer. With `keeps_unreadable`, arguments of calls stay text
    where they are no JSON."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise DataError(f"{type(value).__name__} {value!r:.60}")
    if not value:
        raise DataError("an empty list of messages")
    found: list[Message] = []
    for number, message in enumerate(value):
        is_last = may_begin and number == len(value) - 1
        try:
            read = read_message(message, is_last=is_last, keeps_unreadable=keeps_unreadable)
        except DataError as error:
            raise DataError(f"message {number} {error}") from error
        except (TypeError, ValueError, RuntimeError) as error:  # of a value that is no JSON, such as a tensor
            what = f"with values that are no JSON ({type(error).__name__}: {error!s:.60})"
            raise DataError(f"message {number} {what}; expected texts, numbers, lists and objects") from error
        if number and _is_of_calls(message) and found[-1]["role"] == ASSISTANT:  # its turn goes on with a call
            begun = found[-1]
            others = {
                name: value for name, value in {"weight": None, **read}.items() if name not in ("role", "content", "tool_calls")
            }
            if odd := next((name for name, value in others.items() if begun.get(name) != value), None):
                raise DataError(
                    f"message {number}, whose calls go on with the assistant's message {number - 1}, with another {odd!r}; "
                    "expected the same in both"
                )
            found[-1] = {**begun, "tool_calls": [*begun.get("tool_calls", ()), *read["tool_calls"]]}
        else:
            found.append(read)
    return found


def read_message(message: object, *, is_last: bool = False, keeps_unreadable: bool = False) -> Message:
    """Read one message. The DataError's text completes a sentence that begins with "found a message"."""
    if not isinstance(message, Mapping):
        raise DataError(f"that is {type(message).__name__} {message!r:.60}, not an object with role and content")
    if _is_of_calls(message):
        message = _with_calls(message)
    role = _role(message)
    calls = _read_calls(message, keeps_unreadable)
    thoughts = {name: message[name] for name in THOUGHTS if message.get(name)}
    if odd := next((name for name, text in thoughts.items() if not isinstance(text, str)), None):
        raise DataError(f"whose {odd!r} is {type(message[odd]).__name__}, not text")
    if len({*thoughts.values()}) > 1:
        raise DataError(f"with different texts as {' and '.join(map(repr, thoughts))}")
    if role != ASSISTANT and (own := ["tool_calls"] * bool(calls) + [*thoughts]):
        raise DataError(f"of the role {role!r} with {own[0]!r}, which only the assistant's messages have")
    if message.get("prefix") and not (is_last and role == ASSISTANT):
        raise DataError("with 'prefix', which only the last message of a prompt may have, and of the assistant's")
    normal: dict[str, Any] = {"role": role, "content": _read_content(message, may_be_none=bool(calls or thoughts)), **thoughts}
    if calls:
        normal["tool_calls"] = calls
    if not _is_learned(message, role):
        normal["weight"] = 0
    normal |= _others(message)
    return normal


def role_of(message: object) -> str:
    """Return OpenAI's name of the role of a message in any public form; "" for a value that is no message."""
    if not isinstance(message, Mapping):
        return ""
    return ASSISTANT if _is_of_calls(message) else _ROLES.get(role := str(message.get("role") or message.get("from")), role)


def read_tools(value: object) -> tuple[Tool, ...]:
    """Read the tools of a row or a request: a list, or its JSON text. The DataError's text completes "found …"."""
    tools = _parsed(value, "tools") if isinstance(value, str) and value else value
    if not has_value(tools):
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise DataError(f"the tools {value!r:.60}; expected a list of {_TOOL}")
    return tuple(_read_tool(number, tool) for number, tool in enumerate(tools))


def read_arguments(value: object) -> dict[str, Any]:
    """Read the arguments of a call: an object, or its JSON text. Null and "" are an empty object."""
    arguments = _parsed(value, "arguments") if isinstance(value, str) and value else value
    arguments = {} if arguments in (None, "") else arguments
    if not isinstance(arguments, Mapping):
        raise DataError(f"arguments that are {type(arguments).__name__} {value!r:.60}; expected a JSON object")
    arguments = dict(arguments)
    if not isinstance(value, str):  # a text has been parsed
        _require_json(arguments, "arguments")
    return arguments


def thought_of(message: Message) -> str:
    """Return the thought of an answer's message that is a field besides its content; "" where it has none."""
    return next((str(message[name]) for name in THOUGHTS if message.get(name)), "")


def read_image_part(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a part of a message that is an image, as {"type": "image", "image": …}; return None for any other part. "image" is
    None for a placeholder, which an image of the row's column fills."""
    if part.get("type") not in _IMAGES:
        return None
    values = {name: part[name] for name in synonyms("part", "image") if part.get(name) is not None}
    if len(values) > 1:
        raise DataError(f"an image by {' and '.join(map(repr, values))}; expected one of them")
    _require_known("part", part, {"type", *values})
    value = next(iter(values.values()), None)
    if isinstance(value, Mapping) and "image_url" in values:
        _require_known("part", value, {"url"})
        value = value.get("url")
    return {"type": "image", "image": image_source(value, is_base64="base64" in values)}


def _role(message: Mapping[str, Any]) -> str:
    name, role = _either(message, "role", "from")
    if not isinstance(role, str):
        raise DataError(f"whose {name!r} is {type(role).__name__}, not text")
    usual = (*_ROLES, *_ROLES.values(), *_CALLS, "system", "developer", "function")
    if role not in usual and (name == "from" or get_close_matches(role.strip().lower(), usual, cutoff=SLIP)):
        raise DataError(f"whose {name!r} is {role!r:.40}; expected one of {', '.join((*_ROLES, *_CALLS, 'system'))}")
    return _ROLES.get(role, role)


def _either(message: Mapping[str, Any], name: str, other: str) -> tuple[str, Any]:
    """Return the name and the value of a message's field, or those of ShareGPT's field of the same meaning."""
    if message.get(name) is None and message.get(other) is not None:
        return other, message[other]
    if message.get(other) not in (None, message.get(name)):
        raise DataError(f"with both {name!r} and {other!r}, which contradict each other")
    return name, message.get(name)


def _is_of_calls(message: object) -> bool:
    return isinstance(message, Mapping) and (message.get("role") or message.get("from")) in _CALLS


def _with_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Turn a message of a role in _CALLS into an assistant's message with `tool_calls`."""
    _, content = _either(message, "content", "value")
    calls = _parsed(content, "calls", "with") if isinstance(content, str) else content
    others = {name: value for name, value in message.items() if name not in ("role", "from", "content", "value")}
    return {**others, "role": ASSISTANT, "tool_calls": calls if isinstance(calls, list) else [calls]}


def _read_content(message: Mapping[str, Any], *, may_be_none: bool) -> str | list[Mapping[str, Any]]:
    """Read the content of a message: text, or parts where it has images."""
    content: Any = _either(message, "content", "value")[1]
    if message.get("refusal"):
        if content:
            raise DataError("with both 'content' and 'refusal'")
        content = message["refusal"]
    if content is None and may_be_none:
        return ""
    parts: str | list[Any] = content
    if isinstance(content, list | tuple):
        try:
            parts = [_read_part(part) if isinstance(part, Mapping) else part for part in content]
        except DataError as error:
            raise DataError(f"whose 'content' has {error}") from error
    if fault := content_fault(parts):
        raise DataError(f"whose 'content' is {fault}")
    if isinstance(parts, str) or any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _read_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if (image := read_image_part(part)) is not None:
        return image
    kind = part.get("type")
    if kind not in _TEXTS:
        return part  # content_fault names it
    field = "refusal" if kind == "refusal" else "text"
    _require_known("part", part, {"type", field})
    return {"type": "text", "text": part.get(field)}


def _read_calls(message: Mapping[str, Any], keeps_unreadable: bool) -> list[dict[str, Any]]:
    calls: Any = message.get("tool_calls")
    if isinstance(calls, str):
        calls = _parsed(calls, "'tool_calls'", "with") if calls else None
    if legacy := message.get("function_call"):
        if calls:
            raise DataError("with both 'tool_calls' and 'function_call'")
        calls = [{"function": legacy}]
    if not isinstance(calls or [], Sequence) or isinstance(calls, str):
        raise DataError(f"whose 'tool_calls' are {type(calls).__name__}, not a list")
    found = []
    for number, call in enumerate(calls or []):
        try:
            found.append(_read_call(call, keeps_unreadable))
        except DataError as error:
            raise DataError(f"whose call {number} has {error}") from error
    return found


def _read_call(call: object, keeps_unreadable: bool) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise DataError(f"the form {call!r:.60}; expected an object with function.name and function.arguments")
    function: Any = call.get("function")
    if function is None:
        _require_known("call", call, {"id", "type", "name", "arguments"})
        function = {name: call.get(name) for name in ("name", "arguments")}
    else:
        _require_known("call", call, {"id", "type", "function"})
    if call.get("type", "function") not in ("function", None):
        raise DataError(f"the type {call['type']!r}; expected 'function'")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"the function {function!r:.60}; expected one with name and arguments")
    _require_known("call", function, {"name", "arguments"})
    try:
        arguments: Any = read_arguments(function.get("arguments"))
    except DataError:
        if not keeps_unreadable or not isinstance(function.get("arguments"), str):
            raise
        arguments = function["arguments"]
    read: dict[str, Any] = {} if call.get("id") is None else {"id": call["id"]}
    return {**read, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _read_tool(number: int, tool: object) -> Tool:
    """Read a tool into the form of OpenAI's chats. The Responses API and transformers write the function's fields without
    `function` around them."""
    tool = _parsed(tool, f"tool {number}") if isinstance(tool, str) else tool
    if not isinstance(tool, Mapping) or tool.get("type", "function") not in ("function", None):
        raise DataError(f"tool {number} as {tool!r:.60}; expected {_TOOL}")
    function: Any = tool.get("function")
    if function is None:
        function = {name: value for name, value in tool.items() if name != "type"}
    elif odd := [name for name, value in tool.items() if name not in ("type", "function") and value is not None]:
        raise DataError(f"tool {number} with the unknown field {odd[0]!r}; expected {_TOOL}")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"tool {number} as {tool!r:.60}; expected {_TOOL}")
    if isinstance(function.get("parameters"), str):
        function = {**function, "parameters": _parsed(function["parameters"], f"tool {number}'s parameters")}
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise DataError(f"tool {number} with the parameters {function['parameters']!r:.60}; expected a JSON schema")
    if refused := sorted(name for name in names_of("tool", "refused") if has_value(function.get(name))):
        raise DataError(f"tool {number} with the field {refused[0]!r}: {instead_of('tool', refused[0])}")
    _require_json(function, f"tool {number}")
    return {"type": "function", "function": dict(function)}


def _is_learned(message: Mapping[str, Any], role: str) -> bool:
    said = {name: message[name] for name in IN_LOSS if message.get(name) is not None}
    for name, value in said.items():
        if value not in (0, 1):  # True and False are among these
            raise DataError(f"whose {name!r} is {value!r:.60}; expected 0, 1, false or true: an answer is learned or it is not")
        if value and role != ASSISTANT:
            raise DataError(f"of the role {role!r} whose {name!r} is {value!r}; only the assistant's messages are learned")
    if len({bool(value) for value in said.values()}) > 1:
        raise DataError(f"with {' and '.join(map(repr, said))}, which contradict each other")
    return role != ASSISTANT or all(said.values())


def _others(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return names, ids and fields that only a chat template can use. DataError for refused fields."""
    read = _READ | _DROPPED | {*THOUGHTS}
    others = {name: value for name, value in message.items() if name not in read and has_value(value)}
    if refused := next(iter(names_of("message", "refused") & others.keys()), None):
        raise DataError(f"with the field {refused!r}: {instead_of('message', refused)}")
    for name in ("name", "tool_call_id"):
        if not isinstance(others.get(name, ""), str):
            raise DataError(f"whose {name!r} is {type(others[name]).__name__}, not text")
    return others


def _require_known(level: Any, value: Mapping[str, Any], known: set[str]) -> None:
    """Refuse, with a DataError, a part or a call that has a refused or unknown field with a value."""
    known = known | names_of(level, "no effect")
    for name in value:
        if name not in known and has_value(value[name]):
            remedy = instead_of(level, name) if name in names_of(level, "refused") else "leave it out"
            raise DataError(f"the unknown field {name!r}: {remedy}")


def has_value(value: object) -> bool:
    """Return whether a field has a value: null and empty values count as absent."""
    return value is not None and not (isinstance(value, str | Sequence | Mapping) and not value)


def _parsed(text: str, what: str, before: str = "") -> Any:
    """Parse JSON text. DataError where it is none, or holds NaN or half a character."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=unique_keys)
        _require_json(value, what)
    except (ValueError, RecursionError) as error:
        found = f"{before} {what} that are no JSON: {text!r:.60} ({error})".strip()
        raise DataError(found) from error
    return value


def _require_json(value: object, what: str) -> None:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{what}, which JSON cannot hold: {error}") from error
    if half := lone_surrogate(text):
        raise DataError(f"{what} with {half}; expected Unicode text")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")

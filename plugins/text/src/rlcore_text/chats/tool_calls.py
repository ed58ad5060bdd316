"""Calls of tools in what a policy says: the forms that are read here, and those that a generator's engine reads."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from attrs import frozen

from rlcore.run.data.text import EngineParser
from rlcore.schema.suggestions import nearest
from rlcore.spi import ConfigError, ParseToolCalls, Problem, Tool, ToolCall
from rlcore.thoughts import MARKS, is_end

AUTO = "auto"
END_OF_THOUGHT, THOUGHT = "</think>", "<think>"
HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=([\w.-]+))?<\|channel\|>(?:analysis|commentary)(?: to=([\w.-]+))?"
    r"[^<]*(?:<\|constrain\|>\w*)?<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
"""A message of gpt-oss that is no final answer. One to a recipient is a call."""
BRACKET = re.compile(r"[<{\[]")
PYTHON_TAG = "<|python_tag|>"
_DECODER = json.JSONDecoder(parse_constant=lambda name: _refuse(f"found {name}, which is not JSON"))


@frozen
class ToolParser:
    """Finds the calls of tools in a turn."""

    name: str
    _find: ParseToolCalls

    @classmethod
    def named(cls, name: str, chat_template: str | None, engine: EngineParser | None = None) -> "ToolParser | None":
        """The parser that `rollout.tool_parser` names. None for "auto" where the chat template shows neither of the core's own
        forms; ConfigError for a name that neither the core nor the generator knows."""
        if name == AUTO:
            form = form_of(chat_template)
            return None if form is None else cls(form, FORMS[form])
        found = FORMS.get(name) or (None if engine is None else engine(name))
        if found is None:
            raise ConfigError(
                [
                    Problem(
                        path="rollout.tool_parser",
                        found=f'"{name}"',
                        expected=f"one of {', '.join((AUTO, *FORMS))}, or a parser that the generator brings",
                        remedy=f'Did you mean "{near}"?' if (near := nearest(name, (AUTO, *FORMS))) else "",
                    )
                ]
            )
        return cls(name, found)

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """The text without the calls, and the calls in order, those that could not be read among them. What a policy thinks,
        up to the last end of a thought, calls nothing. Never raises: what a parser raises is a call that could not be read."""
        said = behind_thought(text)
        thought = text[: len(text) - len(said)]
        try:
            content, calls = self._find(said, tools)
        except Exception as error:  # an engine's parser may raise whatever it likes
            return text, (ToolCall(id="call_0", name="", text=said, error=f"{type(error).__name__}: {error}"),)
        return f"{thought}{content}", tuple(calls)


def behind_thought(response: str) -> str:
    """Return what stands behind the last thought of a response; "" where that thought does not end. A mark behind an opening
    bracket is text, as within the arguments of a call."""
    behind, is_open, is_first = 0, False, True
    for mark in MARKS.finditer(response):
        if not is_end(mark):
            is_open = is_open or BRACKET.search(response, behind, mark.start()) is None
        elif is_open or (is_first and not mark[0].lower().startswith("assistant")):
            behind, is_open = mark.end(), False
        is_first = False
    return "" if is_open else response[behind:]


def form_of(chat_template: str | None) -> str | None:
    """Return which of the core's own forms a chat template asks the policy to write calls in; None where it is neither."""
    template = chat_template or ""
    if "<tool_call>" in template and not any(other in template for other in ("<function=", "<arg_key>")):
        return "hermes"
    if "<|channel|>commentary" in template:
        return "openai"
    if "ipython" in template and "parameters" in template:
        return "llama3_json"
    return None


def hermes(text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[ToolCall]]:  # noqa: ARG001 - the form of a ParseToolCalls
    """Read the calls of Hermes, Qwen2.5 and Qwen3: each {"name": …, "arguments": {…}} within <tool_call>, the last of which
    need not be closed. The text is what stands before the first and behind closed ones."""
    matches = list(HERMES.finditer(text))
    calls = [_call(number, match.group(1), ("arguments",)) for number, match in enumerate(matches)]
    return HERMES.sub("", text).strip() if matches else text, calls


def llama3_json(text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[ToolCall]]:  # noqa: ARG001 - as above
    """Read the calls of Llama 3.1 and 3.2: objects {"name": …, "parameters": {…}} and nothing else, several parted by
    semicolons; or whatever follows <|python_tag|>."""
    before, tag, after = text.partition(PYTHON_TAG)
    written = after if tag else text
    if not tag and not (text.lstrip().startswith("{") and '"name"' in text):
        return text, []
    calls = [_call(number, piece, ("parameters", "arguments")) for number, piece in enumerate(_objects(written))]
    return before.strip() if tag else "", calls


def openai(text: str, tools: Sequence[Tool] = ()) -> tuple[str, list[ToolCall]]:  # noqa: ARG001 - as above
    """Read the calls of gpt-oss: messages to a recipient functions.NAME whose content is the arguments."""
    calls = [(match[1] or match[2], match[3]) for match in HARMONY.finditer(text) if match[1] or match[2]]
    content = HARMONY.sub(lambda match: "" if match[1] or match[2] else match[0], text).strip() if calls else text
    return content, [_call(number, said, (), name.removeprefix("functions.")) for number, (name, said) in enumerate(calls)]


FORMS: dict[str, ParseToolCalls] = {"hermes": hermes, "llama3_json": llama3_json, "openai": openai}
"""The forms that the core reads itself, by the names that serving engines know them by."""


_OPENINGS = {"hermes": ('<tool_call>\n{"name": "', "arguments"), "llama3_json": ('{"name": "', "parameters")}


def tool_forms() -> tuple[str, ...]:
    """Return the names of these forms."""
    return tuple(FORMS)


def call_opening(form: str, name: str) -> str | None:
    """Return the text that a call of a tool begins with in one of the core's forms, up to the tool's name or, with a `name`, up
    to the arguments; None for a form in which an answer cannot be begun so."""
    begin, arguments = _OPENINGS.get(form, ("", ""))
    return f'{begin}{name}", "{arguments}":' if begin and name else begin or None


def _objects(text: str) -> Iterator[str]:
    """The pieces of a text that are JSON values, parted by semicolons; what is left where one is not is the last piece."""
    rest = text.strip()
    while True:
        try:
            end = _DECODER.raw_decode(rest)[1]
        except (ValueError, RecursionError):
            yield rest
            return
        piece, rest = rest[:end], rest[end:].lstrip()
        if rest and not rest.startswith(";"):
            yield f"{piece} {rest}"
            return
        yield piece
        rest = rest.removeprefix(";").lstrip()
        if not rest:
            return


def _call(number: int, text: str, keys: tuple[str, ...], name: str = "") -> ToolCall:
    """The call that a text is, with the arguments under one of `keys`; with a `name`, the text is the arguments."""
    try:
        value: Any = _DECODER.decode(text.strip())
        if name:
            value, keys = {"name": name, "arguments": value}, ("arguments",)
        if not isinstance(value, dict):
            _refuse(f"found {type(value).__name__}; expected an object with name and {keys[0]}")
        if not isinstance(value.get("name"), str) or not value["name"]:
            _refuse("found no name; expected the tool's")
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is in no text that a tokenizer takes
        name = value["name"]
        arguments = next((value[key] for key in keys if key in value), None)
        if not isinstance(arguments, dict):
            _refuse(f"found {type(arguments).__name__} as {keys[0]}; expected an object")
    except (ValueError, RecursionError) as error:
        return ToolCall(id=f"call_{number}", name=name, text=text, error=str(error))
    return ToolCall(id=f"call_{number}", name=name, arguments=arguments, text=text)


def _refuse(reason: str) -> NoReturn:
    raise ValueError(reason)

"""The tool calls in an answer, in the form of Hermes: JSON objects between <tool_call> and </tool_call>."""

import json
import re
from typing import Any

from attrs import field, frozen

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@frozen(kw_only=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any] = field(factory=dict)


class ToolParser:
    """Reads tool calls. What is no well-formed call stays part of the text."""

    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return an answer's text without its tool calls, and these."""
        calls: list[ToolCall] = []

        def take(match: re.Match[str]) -> str:
            call = _call(match.group(1))
            if call is None:
                return match.group(0)
            calls.append(call)
            return ""

        content = _CALL.sub(take, text)
        return (content.strip() if calls else text), calls


def _call(text: str) -> ToolCall | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", {})
    return ToolCall(name=found["name"], arguments=arguments) if isinstance(arguments, dict) else None

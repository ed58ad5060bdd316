"""Tools for chat templates that read none: text describes them, and has calls and results in the form of Hermes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.spi import Message

_INSTRUCTIONS = """You may call tools. Each line within <tools></tools> describes one:
<tools>
{tools}
</tools>
Call a tool by a JSON object with its name and arguments:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


def shows_tools(chat_template: str | None) -> bool:
    """Return whether a chat template reads the tools that it is given."""
    return "tools" in (chat_template or "")


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages of a conversation with its tools described in the first one that is the system's or the user's."""
    shown = as_text(messages)
    described = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    for number, message in enumerate(shown):
        if message["role"] in ("system", "developer", "user"):
            shown[number] = {**message, "content": f"{described}\n\n{message['content']}"}
            return shown
    return [{"role": "user", "content": described}, *shown]


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages with calls and results as text. Results that follow each other are one message of the user."""
    shown: list[Message] = []
    is_result = False
    for message in messages:
        text = message["content"]
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if is_result:
                shown[-1] = {**shown[-1], "content": f"{shown[-1]['content']}\n{text}"}
            else:
                shown.append({"role": "user", "content": text})
        else:
            calls = [
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                for call in message.get("tool_calls", ())
            ]
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            shown.append({**kept, "content": "\n".join([text, *calls] if text else calls)} if calls else kept)
        is_result = message["role"] == "tool"
    return shown

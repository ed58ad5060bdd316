"""The interface of a row format, and what several formats share.

In `pyproject.toml`::

    [project.entry-points."rlcore.row_formats"]
    theirs = "my_package.theirs:convert"

The function is called as convert(row, use) with a row's fields and a Use. It returns the fields in rlcore's form, or None for a
row of another layout. `"auto"` calls it with the first row; later calls get each row. It changes neither the row nor a value of
it. DataError names a fault of a row of this layout; its text completes a sentence that begins with "found".
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from rlcore.spi import DataError
from rlcore_text.chats.messages import ASSISTANT, has_value, role_of

Fields: TypeAlias = Mapping[str, Any]
"""The fields of a row by name."""
Use: TypeAlias = Literal["demonstrations", "preferences", "rollouts"]
"""The way in which a run uses rows: it learns an answer, it learns which of two answers is better, or it samples answers."""
LIST_COLUMNS = frozenset(
    {"conversations", "context", "completions", "history", "input", "preferred_output", "non_preferred_output"}
)
"""Columns of the formats here that hold lists or structs of messages."""


def has_all(row: Fields, *names: str) -> bool:
    """Return whether the row has a value in each of these fields."""
    return all(has_value(row.get(name)) for name in names)


def is_list(value: object) -> bool:
    """Return whether a value is a list, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def without(row: Fields, *names: str) -> dict[str, Any]:
    """Return the other fields of a row."""
    return {name: value for name, value in row.items() if name not in names}


def of_chat(others: Fields, messages: Any, use: Use) -> dict[str, Any]:
    """Return a row of a chat: `messages` to learn from, or for rollouts `prompt`, and the last answer as `answer`."""
    if use == "demonstrations":
        return {**others, "messages": messages}
    if not is_list(messages):
        raise DataError(f"{type(messages).__name__} {messages!r:.60}; expected a list of chat messages")
    last: Any = messages[-1] if messages else None
    if role_of(last) != ASSISTANT:
        return {**others, "prompt": messages}
    content = last.get("content") or last.get("value")
    return {"answer": content, **others, "prompt": messages[:-1]}


def user(content: object) -> dict[str, Any]:
    """Return a message of the user's."""
    return {"role": "user", "content": content}


def assistant(content: object) -> dict[str, Any]:
    """Return a message of the assistant's."""
    return {"role": ASSISTANT, "content": content}


def with_system(system: object, messages: Sequence[Any]) -> list[Any]:
    """Return messages behind a system message, where its text is not empty."""
    return [*([{"role": "system", "content": system}] if has_value(system) else ()), *messages]

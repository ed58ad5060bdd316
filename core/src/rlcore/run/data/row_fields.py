"""The fields of a row that the core reads: what a prompt may be, and what is said where there is none."""

from collections.abc import Mapping, Sequence

from rlcore.half_characters import half_character
from rlcore.images import content_fault
from rlcore.schema.suggestions import nearest
from rlcore.spi import DataError

PROMPT, COMPLETION = "prompt", "completion"
_USUAL_PROMPT_FIELDS = ("question", "problem", "instruction", "messages", "input", "query", "text")


def no_such_field(key: str, where: str, wanted: str, found: Sequence[str]) -> DataError:
    near = nearest(wanted, found) or next((name for name in _USUAL_PROMPT_FIELDS if name in found), None)
    hint = f'. Did you mean {key}.prompt_field = "{near}"?' if near else f". Set {key}.prompt_field to one of them"
    listed = ", ".join(map(repr, found)) or "none"
    return DataError(f"{key}: {where} lacks the field {wanted!r} ({key}.prompt_field); found the fields {listed}{hint}")


def prompt_fault(value: object) -> str | None:
    """What keeps `value` from being a prompt (text, or chat messages), or None where nothing does."""
    if isinstance(value, str):
        half = half_character(value)
        return "an empty text" if not value else f"a text with {half}" if half else None
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        return f"{type(value).__name__} {value!r:.60}"
    if not value:
        return "an empty list of messages"
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            return f"{type(message).__name__} as message {number}"
        if not isinstance(message.get("role"), str):
            return f"message {number} whose 'role' is {type(message.get('role')).__name__}, not text"
        if fault := content_fault(message.get("content")):
            return f"message {number} whose 'content' is {fault}"
    return None

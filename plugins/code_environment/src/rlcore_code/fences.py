"""Finds the program in a response."""

import re

from rlcore.thoughts import without_thoughts

_BLOCK = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[^\n`]*\n(?P<code>.*?)^[ \t]*(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE)


def last_program(response: str, *, is_thinking: bool = False) -> str | None:
    """Return the content of the last closed code block outside thoughts; None where there is none. With `is_thinking` the
    response begins within a thought."""
    blocks = [match["code"] for match in _BLOCK.finditer(without_thoughts(response, is_thinking=is_thinking))]
    return blocks[-1] if blocks else None

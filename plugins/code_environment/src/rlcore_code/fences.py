"""The program in a response."""

import re

from rlcore.thoughts import without_thoughts

_BLOCK = re.compile(r"^[ \t]*(?P<fence>`{3,}|~{3,})[^\n`]*\n(?P<code>.*?)^[ \t]*(?P=fence)[ \t]*$", re.DOTALL | re.MULTILINE)


def last_program(response: str) -> str | None:
    """What stands in the last code block that is closed; None without one. A program that is only thought of is none."""
    blocks = [match["code"] for match in _BLOCK.finditer(without_thoughts(response))]
    return blocks[-1] if blocks else None

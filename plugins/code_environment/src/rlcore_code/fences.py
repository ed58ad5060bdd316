"""Finds the program in a response."""

import re
from bisect import bisect_left
from collections import defaultdict

from rlcore.thoughts import without_thoughts

_OPENING = re.compile(r"[ \t]*(`{3,}+|~{3,}+)[^`]*")
_CLOSING = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*")


def last_program(response: str, *, is_thinking: bool = False) -> str | None:
    """Return the content of the last closed code block outside thoughts; None where there is none. With `is_thinking` the
    response begins within a thought. It takes time in proportion to the response's length."""
    lines = without_thoughts(response, is_thinking=is_thinking).split("\n")
    closing: defaultdict[str, list[int]] = defaultdict(list)
    for number, line in enumerate(lines):
        if fence := _CLOSING.fullmatch(line):
            closing[fence[1]].append(number)
    program, number = None, 0
    while number < len(lines):
        opening = _OPENING.fullmatch(lines[number])
        number += 1
        ends = closing[opening[1]] if opening else []
        if (place := bisect_left(ends, number)) < len(ends):
            program, number = lines[number : ends[place]], ends[place] + 1
    return None if program is None else "".join(f"{line}\n" for line in program)

"""The boxes of a response: \\boxed{...} or \\fbox{...}."""

import re
from collections.abc import Iterator

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def last_box(text: str) -> str | None:
    """The content of the last box, boxes within it opened. A box that is empty or never closed is none."""
    contents = [BOX.sub("{", content) for content in _outer_boxes(text)]
    return next((content for content in reversed(contents) if content.strip(" \t\n{}")), None)


def _outer_boxes(text: str) -> Iterator[str]:
    """Contents of the boxes that stand in no other one."""
    position = 0
    while match := BOX.search(text, position):
        end = _closing_brace(text, match.end())
        if end is None:
            position = match.end()  # one within it may be closed
        else:
            yield text[match.end() : end]
            position = end + 1


def _closing_brace(text: str, start: int) -> int | None:
    """The index of the brace that closes the one before `start`; None where none does."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        if match.group() in "{}":
            depth += 1 if match.group() == "{" else -1
            if depth == 0:
                return match.start()
    return None

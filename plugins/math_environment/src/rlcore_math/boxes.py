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
    position, ends = 0, _closing_braces(text)
    while match := BOX.search(text, position):
        end = ends.get(match.end() - 1)
        if end is None:
            position = match.end()  # one within it may be closed
        else:
            yield text[match.end() : end]
            position = end + 1


def _closing_braces(text: str) -> dict[int, int]:
    """The index of the brace that closes each one, by the index of that; found in one pass."""
    found, opened = {}, list[int]()
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            found[opened.pop()] = match.start()
    return found

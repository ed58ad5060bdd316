"""What a response says besides what is thought aloud in it."""

import re

_MARKS = re.compile(
    r"[<◁](/?)(?:seed:)?(?:think|thinking|thought|reasoning)[>▷]|\[(/?)THINK\]|<\|(begin|end)_of_thought\|>"
    r"|\Aanalysis(?=[\w\\$*])|assistant(analysis|final)(?=\S)",
    re.IGNORECASE,
)
"""The beginning and the end of a thought, in the forms of model families. The last two are gpt-oss's channels, as they are in a
text without special tokens."""
_ENDS = ("/", "end", "final")


def without_thoughts(response: str, *, is_thinking: bool = False) -> str:
    """The response without its thoughts. One that has no end goes on to the response's last character; an end without a
    beginning ends a thought that began with the response, as it does in any case where `is_thinking`."""
    said: list[str] = []
    start = None if is_thinking else 0
    for mark in _MARKS.finditer(response):
        is_end = next(filter(None, mark.groups()), "").lower() in _ENDS
        if is_end:
            said, start = ([] if start is not None else said), mark.end()
        elif start is not None:
            said.append(response[start : mark.start()])
            start = None
    return "".join([*said, "" if start is None else response[start:]])

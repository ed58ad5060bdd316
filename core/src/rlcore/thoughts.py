"""Strip a reasoning model's thoughts, such as `<think>…</think>`, from its response."""

import re

MARKS = re.compile(
    r"[<◁](/?)(?:[a-z]+[:_])?(?:think|thinking|thoughts?|reasoning|scratchpad)(?:\s+[\w-]+=[^<>◁▷]*|\s*)[>▷]"
    r"|\[(/?)THINK\]|<\|(begin|end)_of_thought\|>|<\|channel\|>(analysis|final)<\|message\|>"
    r"|<\|(START|END)_THINKING\|>|<(?:\|channel|channel(\|))>|<\|inner_(prefix|suffix)\|>"
    r"|\Aanalysis(?=[\w\\$*])|assistant(analysis|final)(?=\S)"
    r"|(?=(?:<\|start\|>assistant)?(?: to=[\w.-]+)?<\|channel\|>(commentary))|(?=assistant(commentary)(?: to=|\S))",
    re.IGNORECASE,
)
"""Marks of the beginning and the end of a thought, by model family. The last ones are gpt-oss's channels, most of them in text
without special tokens. What its commentary says belongs to the answer, calls of tools among it."""
MARK_TOKENS = 48
"""Most tokens of a mark and of white space behind it, by a tokenizer of single characters."""
_ENDS = ("/", "|", "end", "suffix", "final", "commentary")


def opened_thought(prompt: str) -> str:
    """Return the mark of a thought that a prompt ends in, behind which the answer begins; "" where it ends otherwise."""
    mark = next(reversed([*MARKS.finditer(prompt)]), None)
    if mark is None or is_end(mark) or prompt[mark.end() :].strip() not in ("", "thought"):  # the name of Gemma 4's channel
        return ""
    return mark[0]


def is_end(mark: re.Match[str]) -> bool:
    """Return whether one of MARKS ends a thought."""
    return next(filter(None, mark.groups()), "").lower() in _ENDS


def without_thoughts(response: str, *, is_thinking: bool = False) -> str:
    """Return the response without its thoughts.

    A thought without an end mark lasts until the response ends. An end mark without a beginning ends a thought that began with
    the response. With `is_thinking` the response begins within a thought.
    """
    kept: list[str] = []
    start = None if is_thinking else 0
    for mark in MARKS.finditer(response):
        if is_end(mark):
            kept, start = ([] if start is not None else kept), mark.end()
        elif start is not None:
            kept.append(response[start : mark.start()])
            start = None
    return "".join([*kept, "" if start is None else response[start:]])

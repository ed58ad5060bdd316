"""The text of an answer as its tokens come, in pieces that no later token changes."""

import re
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from attrs import define, field, frozen

from rlcore.thoughts import MARKS, is_end

Piece: TypeAlias = tuple[Literal["reasoning", "content"], str]
"""A part of an answer, and more text of it."""
REPLACEMENT = "\ufffd"
"""The replacement for bytes that are no character."""
_MARK_BEGINS = re.compile(r"(?:[<◁\[][^>▷\]]{0,60}|assist\w*|a(?:s(?:s(?:is?)?)?)?)\Z", re.IGNORECASE)
"""The end of a text that may become the mark of a thought."""
_WORD_MARK = "analysis"
"""The text form of gpt-oss begins with it: its marks are words, and nothing is certain before its end."""
_CALL_BEGINS = re.compile(r"\A\s*[{\[]|<(?=[A-Za-z|/｜]|\Z)|\[(?=[A-Z]|\Z)")
"""The beginning of what may be a call, in all forms of calls that parsers read."""


@frozen
class Parts:
    """An answer's thought and the text behind it."""

    reasoning: str
    content: str


def split_thought(text: str, *, is_thinking: bool) -> Parts:
    """Divide a response that begins with a thought; `is_thinking`: whether its prompt ends in the mark that begins one. A
    thought without an end mark lasts until the response ends. White space around both parts is left out where there is one."""
    start = _thought_start(text, is_thinking)
    if start is None:
        return Parts("", text)
    end = _thought_end(text, start)
    if end is None:
        return Parts(text[start:].strip(), "")
    return Parts(text[start : end.start()].strip(), text[end.end() :].lstrip())


def certain_parts(text: str, *, is_thinking: bool, has_tools: bool) -> Parts:
    """Return what `split_thought` gives of every text that begins with this one, as far as that is certain. With tools, the
    content ends where a call may begin."""
    if text.lstrip().lower().startswith(_WORD_MARK[: len(text.strip())] if text.strip() else " "):
        return Parts("", "")
    start = _thought_start(text, is_thinking)
    if start is None and _MARK_BEGINS.fullmatch(text.strip()):
        return Parts("", "")
    parts = split_thought(text, is_thinking=is_thinking)
    if start is not None and _thought_end(text, start) is None:
        begun = _MARK_BEGINS.search(text, start)
        return Parts(text[start : len(text) if begun is None else begun.start()].strip(), "")
    content = parts.content
    if has_tools:
        content = content.lstrip()
        begin = _CALL_BEGINS.search(content)
        content = content if begin is None else content[: begin.start()]
    return Parts(parts.reasoning, content.rstrip() if content.strip() else "")


def _thought_end(text: str, start: int) -> re.Match[str] | None:
    return next((mark for mark in MARKS.finditer(text, start) if is_end(mark)), None)


def _thought_start(text: str, is_thinking: bool) -> int | None:
    """Return where the thought begins that a response begins with; None where it begins with none."""
    if is_thinking:
        return 0
    space = len(text) - len(text.lstrip())
    mark = MARKS.match(text, space)
    return None if mark is None or is_end(mark) or not mark[0] else mark.end()


@define(kw_only=True, eq=False)
class LiveText:
    """The text of one answer while its tokens come."""

    decode: Callable[[Sequence[int]], str]
    """Returns the text of tokens without special tokens."""
    show: Callable[[Sequence[int]], str]
    """Returns the text of tokens with special tokens."""
    is_chat: bool
    """True where a thought and calls of tools are divided from the content."""
    is_thinking: bool = False
    has_tools: bool = False
    waits: bool = False
    """True where nothing is certain before the end."""
    stops: tuple[str, ...] = ()
    """The stop strings."""
    _tokens: list[int] = field(factory=list, init=False)
    _window: int = field(default=0, init=False)
    """The first token whose text decides how the next ones are decoded."""
    _decoded: int = field(default=0, init=False)
    """Tokens whose text is known."""
    _text: str = field(default="", init=False)
    _sent: dict[str, str] = field(factory=lambda: {"reasoning": "", "content": ""}, init=False)

    def add(self, tokens: Sequence[int]) -> list[Piece]:
        """Take more tokens, and return the pieces that have become certain."""
        self._tokens += tokens
        before, after = self._tokens[self._window : self._decoded], self._tokens[self._window :]
        known, text = self.decode(before), self.decode(after)
        self.waits = self.waits or (self.has_tools and self.show(after) != text)  # some calls begin with a special token
        if self.waits or text.endswith(REPLACEMENT) or len(text) <= len(known):
            return []
        self._text += text[len(known) :]
        self._window, self._decoded = self._decoded, len(self._tokens)
        certain = _before_stop(self._text, self.stops)
        if not self.is_chat:
            return self._more(Parts("", certain))
        return self._more(certain_parts(certain, is_thinking=self.is_thinking, has_tools=self.has_tools))

    def end(self, parts: Parts) -> list[Piece]:
        """Return the pieces of the whole answer that have not been returned. ValueError where others have been."""
        for name, whole in (("reasoning", parts.reasoning), ("content", parts.content)):
            if not whole.startswith(self._sent[name]):
                raise ValueError(f"the streamed {name} {self._sent[name]!r:.60} is not how the answer begins: {whole!r:.60}")
        return self._more(parts)

    def _more(self, parts: Parts) -> list[Piece]:
        pieces: list[Piece] = []
        if more := parts.reasoning[len(self._sent["reasoning"]) :]:
            pieces.append(("reasoning", more))
            self._sent["reasoning"] = parts.reasoning
        if more := parts.content[len(self._sent["content"]) :]:
            pieces.append(("content", more))
            self._sent["content"] = parts.content
        return pieces


def _before_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text up to the first stop string, or up to an end that may become one."""
    ends = [text.index(stop) for stop in stops if stop in text]
    for stop in stops:
        ends += [len(text) - size for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return text[: min(ends, default=len(text))]

"""What a chat template puts behind an answer: the answer itself is never rendered into tokens again."""

from collections.abc import Callable, Sequence
from itertools import takewhile

from rlcore.sessions.record import Message

Render = Callable[[Sequence[Message]], str]
"""Messages through the chat template, up to where the next answer begins."""
MARK = "\ue000rlcore\ue000"
"""Stands for the answer where only its surroundings are wanted: private-use characters, which no template looks for."""


class RewritingTemplateError(Exception):
    """The chat template changes what it had shown, or what was said, once the conversation goes on."""


def text_behind(
    render: Render, before: Sequence[Message], shown: str, said: str, after: Sequence[Message]
) -> tuple[tuple[Message, ...], str, str]:
    """Return all messages, their rendering, and what the template puts behind an answer when the conversation goes on.

    `shown` is the rendering of the messages `before` the answer, `said` the answer's text, `after` what follows it. White space
    at the answer's edges is passed over. RewritingTemplateError where the template changes anything else.
    """
    messages = (*before, {"role": "assistant", "content": said}, *after)
    whole = render(messages)
    if whole.startswith(shown + said):
        return messages, whole, whole[len(shown) + len(said) :]
    head, found, behind = render((*before, {"role": "assistant", "content": MARK}, *after)).partition(MARK)
    if not found:
        raise RewritingTemplateError("the chat template leaves the model's answer out once the conversation goes on")
    if head != shown:
        difference = _difference(head, shown)
        raise RewritingTemplateError(f"the chat template rewrites earlier messages once the conversation goes on: {difference}")
    expected = head + said + behind
    if "".join(whole.split()) != "".join(expected.split()):
        raise RewritingTemplateError(f"the chat template rewrites the model's answer: {_difference(whole, expected)}")
    return messages, whole, behind


def _difference(found: str, expected: str) -> str:
    """Where two texts part, with a little of each."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, expected, strict=False)))
    start = max(same - 20, 0)
    return f"found {found[start : same + 40]!r}; expected {expected[start : same + 40]!r}"

"""Where a chat template ends an answer: with a token of its own, or with the first one of what follows.

The templates of GLM write the role of the next message, `<|user|>` or `<|observation|>`, and the policy ends its turn by saying
that token. So it belongs to the answer, in every text that the policy learns from.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rlcore.chat.conversation import ends_with_answer
from rlcore.chat.messages import ASSISTANT, thought_of
from rlcore.run.data.chat_template import PROBE
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.spi import DataError
from rlcore.thoughts import without_thoughts

Messages = Sequence[Mapping[str, Any]]


def ended_answer(
    whole: str, opened: str, messages: Messages, tools: Messages, tokenizer: Tokenizer, following: Messages = ()
) -> str:
    """What a template writes behind `opened` for the last of `messages`, an answer, with the token that ends it; without one
    where it ends none. `whole` is its text of them all, and `following` what comes behind them, where that is known."""
    written = whole[len(opened) :].rstrip()  # white space behind an answer belongs to what follows
    for end in _end_pattern(tokenizer).finditer(written):
        behind = written[end.end() :]  # some templates put another token behind a conversation that is over
        if not behind or not tokenizer.decode(tokenizer.encode(behind)).strip():
            return written[: end.end()]
    return written + _following_end(messages, tools, opened + written, tokenizer, following)


def require_shown(message: Mapping[str, Any], answer: str, what: str) -> None:
    """DataError where a template's text of an answer lacks its thought, or the content beside its calls."""
    beside = without_thoughts(message["content"]) if message.get("tool_calls") else ""
    for part, text in (("thought", thought_of(message)), ("content beside the calls", beside)):
        if text.strip() not in answer:
            raise DataError(f"the chat template does not show the {part} of {what}: {text.strip()!r:.60}")


def turn_end(messages: Messages, tools: Messages, tokenizer: Tokenizer) -> str:
    """The token that ends an answer to `messages`, or one that they begin, in text, with the white space before it; empty where
    none does."""
    answered = [*(messages[:-1] if ends_with_answer(messages) else messages), {"role": ASSISTANT, "content": PROBE}]
    try:
        behind = tokenizer.render_answered(answered, tools).partition(PROBE)[2]
    except DataError:
        return ""
    return _first_end(behind, tokenizer) or _following_end(answered, tools, None, tokenizer, ())


def _following_end(messages: Messages, tools: Messages, shown: str | None, tokenizer: Tokenizer, following: Messages) -> str:
    """The end of the last of `messages` that stands first in what follows it, behind the text `shown`. A template may show an
    answer otherwise once a user has replied: the end is then read behind another answer."""
    behind = [*takewhile(lambda message: message["role"] != ASSISTANT, following)] or _replies(messages[-1])
    plain = [*messages[:-1], {"role": ASSISTANT, "content": PROBE}]
    for rendered in (messages, plain) if shown is not None else (plain,):
        try:
            text = tokenizer.render_chat([*rendered, *behind], tools)
        except DataError:  # it takes no such reply
            continue
        if rendered is plain:
            return _first_end(text.partition(PROBE)[2], tokenizer)
        if shown is not None and text.startswith(shown):
            return _first_end(text[len(shown) :], tokenizer)
    return ""


def _replies(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a conversation may go on with: the results of the answer's calls, or a user's message."""
    calls = [call for call in answer.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [call["function"] if isinstance(call.get("function"), Mapping) else call for call in calls]
    results: list[Mapping[str, Any]] = [
        {"role": "tool", "name": function.get("name"), "tool_call_id": call.get("id"), "content": "."}
        for call, function in zip(calls, functions, strict=True)
    ]
    return results or [{"role": "user", "content": "."}]


def _first_end(text: str, tokenizer: Tokenizer) -> str:
    """The beginning of a text up to a token that ends an answer, where nothing but white space stands before that."""
    found = re.match(rf"\s*(?:{_end_pattern(tokenizer).pattern})", text)
    return "" if found is None else found.group()


def _end_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Any token that ends an answer, as text; nothing where there is none."""
    return re.compile(
        "|".join(re.escape(text) for token in tokenizer.stop_token_ids if (text := tokenizer.show([token]))) or r"(?!)"
    )

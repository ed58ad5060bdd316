"""Finds the token that ends an answer in a chat template.

Most templates write an end token. GLM's write none: the role token of the next message, `<|user|>` or `<|observation|>`, ends
the answer, and the policy generates it. That token belongs to the answer in every text that the policy learns from.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from rlcore.spi import DataError, Tokenizer
from rlcore.thoughts import MARKS
from rlcore_text.chats.conversation import ends_with_answer
from rlcore_text.chats.messages import ASSISTANT, thought_of
from rlcore_text.chats.tool_calls import END_OF_THOUGHT, THOUGHT
from rlcore_text.tokenizers.chat_template import PROBE

Messages = Sequence[Mapping[str, Any]]


def ended_answer(
    whole: str, opened: str, messages: Messages, tools: Messages, tokenizer: Tokenizer, following: Messages = ()
) -> str:
    """Return a template's text of an answer, the last of `messages`, with the token that ends it, if any.

    `whole` is the text of all messages, and `opened` its beginning up to the answer. `following` are the next messages, where
    they are known.
    """
    written = whole[len(opened) :].rstrip()  # white space behind an answer belongs to what follows
    for end in _end_pattern(tokenizer).finditer(written):
        behind = written[end.end() :]  # some templates put another token behind a conversation that is over
        if not behind or not tokenizer.decode(tokenizer.encode(behind)).strip():
            return written[: end.end()]
    return written + _following_end(messages, tools, opened + written, tokenizer, following)


def require_shown(message: Mapping[str, Any], whole: str, opened: str, what: str) -> None:
    """Refuse, with a DataError, a rendered chat that does not write its last message behind the text before it, or leaves out
    its thought, beside its content or within it, or the content of a message with calls."""
    answer = whole[len(opened) :]
    if not whole.startswith(opened) or not answer.strip():
        raise DataError(
            f"the chat template does not write {what} behind what comes before it: found {whole[-60:]!r}; expected it to go on "
            f"from {opened[-60:]!r}. Set model.chat_template to one that does, or model.chat_template_kwargs, as where it "
            "opens a thought that answers lack"
        )
    pieces = _between_marks(message["content"])
    # The tokenizer has seen that a text is shown, and templates take thoughts from answers that are only read.
    content = pieces if message.get("tool_calls") or (len(pieces) > 1 and "weight" not in message) else []
    for part, text in [("thought", thought_of(message)), *(("content", piece) for piece in content)]:
        if text.strip() not in answer:
            raise DataError(
                f"the chat template does not show the {part} of {what}: {text.strip()!r:.60}. Set model.chat_template to one "
                "that shows it, or take it out"
            )


def _between_marks(content: str) -> list[str]:
    """Return the texts before, between and behind the marks of thoughts."""
    edges = [0, *(edge for mark in MARKS.finditer(content) for edge in mark.span()), len(content)]
    return [content[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]


def answer_text(messages: Messages, text: str, opened: str, tools: Messages, tokenizer: Tokenizer) -> str:
    """Return the template's text of an answer that is plain `text`, with its end; `opened` is the text of the prompt's
    `messages`. The text stays where the messages begin the answer, and where the template would change it. DataError where it
    leaves a thought open that the template has opened."""
    if not ends_with_answer(messages):
        answered = [*messages, {"role": ASSISTANT, "content": text}]
        with suppress(DataError):  # it takes no such answer
            whole = tokenizer.render_answered(answered, tools)
            if whole.startswith(opened) and text.strip() in whole[len(opened) :]:
                return ended_answer(whole, opened, answered, tools, tokenizer)
        if opened.rstrip().endswith(THOUGHT) and END_OF_THOUGHT not in text:
            raise DataError(
                f"the chat template opens a thought, which {text.strip()!r:.60} does not close; expected {END_OF_THOUGHT} in "
                "it. Or set model.chat_template, or model.chat_template_kwargs, so that the template opens none"
            )
    return text + turn_end(messages, tools, tokenizer)


def turn_end(messages: Messages, tools: Messages, tokenizer: Tokenizer) -> str:
    """Return the text of the token that ends an answer to `messages`, with the white space before it; "" where none does. The
    messages may begin that answer."""
    answered = [*(messages[:-1] if ends_with_answer(messages) else messages), {"role": ASSISTANT, "content": PROBE}]
    try:
        behind = tokenizer.render_answered(answered, tools).partition(PROBE)[2]
    except DataError:
        return ""
    return _first_end(behind, tokenizer) or _following_end(answered, tools, None, tokenizer, ())


def _following_end(messages: Messages, tools: Messages, shown: str | None, tokenizer: Tokenizer, following: Messages) -> str:
    """Return the end token of the last of `messages` that begins the text of the next message.

    `shown` is the text up to there. A template may rewrite an answer once a user has replied: the token is then read after a
    made-up answer.
    """
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
    """Return made-up messages that may follow an answer: results of its calls, or else a user's message."""
    calls = [call for call in answer.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [call["function"] if isinstance(call.get("function"), Mapping) else call for call in calls]
    results: list[Mapping[str, Any]] = [
        {"role": "tool", "name": function.get("name"), "tool_call_id": call.get("id"), "content": "."}
        for call, function in zip(calls, functions, strict=True)
    ]
    return results or [{"role": "user", "content": "."}]


def _first_end(text: str, tokenizer: Tokenizer) -> str:
    """Return an end token at the beginning of a text, with the white space before it; "" where there is none."""
    found = re.match(rf"\s*(?:{_end_pattern(tokenizer).pattern})", text)
    return "" if found is None else found.group()


def _end_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Return a pattern of all end tokens as text; without any, it matches nothing."""
    return re.compile(
        "|".join(re.escape(text) for token in tokenizer.stop_token_ids if (text := tokenizer.show([token]))) or r"(?!)"
    )

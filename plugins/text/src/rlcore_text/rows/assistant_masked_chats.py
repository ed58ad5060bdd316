"""Encodes whole chats to train on: the policy learns the answers, and reads the rest.

The prompt of a turn, the turn with its end token, and the text between two turns are each encoded separately, as they are in
generation. So no token spans the boundary between an answer and the text around it.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

import numpy as np
from attrs import field, frozen

from rlcore import spi
from rlcore.config.data import DatasetConfig
from rlcore.run.data.examples import Examples
from rlcore.spi import Tokenizer
from rlcore.spi.arrays import BoolArray
from rlcore_text.chats.images import image_file, images_of
from rlcore_text.chats.messages import ASSISTANT, IN_LOSS, read_messages, read_tools, thought_of
from rlcore_text.rows.rendering import KeptRows, encode_prompt_texts, end_token, ended
from rlcore_text.rows.row_fields import COMPLETION
from rlcore_text.tokenizers.turn_ends import ended_answer, require_shown

EXPECTED = "be learned from as chats; expected messages with role and content, and an answer of the assistant's"
LIMITS = "rollout.max_prompt_tokens + rollout.max_response_tokens"


def are_chats(rows: Sequence[spi.Row], config: DatasetConfig) -> bool:
    """Return whether rows to learn from are whole chats, by the first of them."""
    return rows[0].get(COMPLETION) is None and config.messages_field in rows[0]


def render_chats(
    rows: Sequence[spi.Row],
    tokenizer: Tokenizer,
    config: DatasetConfig,
    *,
    key: str,
    max_tokens: int,
    history: Literal["refuse", "keep_sampled", "segment"],
) -> Examples:
    """Each row's chat up to its last answer, in one sequence, or with "segment" in several where the template rewrites what it
    had shown: each then has the answers that the policy would give with what it shows there. DataError names the rows that are
    no chats, or cannot be shown, and one over `max_tokens` where that is an error."""
    eos = end_token(tokenizer)
    chats = KeptRows(key, config, rows, EXPECTED)
    learned, counts = [np.zeros(0, np.bool_)], []
    for start, chunk in chats.chunks():
        for number, row in enumerate(chunk, start=start):
            try:
                segments = _segments(row, tokenizer, config, history)
            except spi.DataError as error:
                chats.faults.add(number, str(error))
                continue
            encoded = [_tokens(segment, tokenizer, eos) for segment in segments]
            if chats.limits.admits(number, "chat", max(len(tokens) for tokens, _ in encoded), LIMITS, max_tokens):
                chats.keep(number, [tokens for tokens, _ in encoded], [segment.images for segment in segments])
                learned += [mask for _, mask in encoded]
                counts.append(len(encoded))
    joined = chats.joined()
    return Examples(
        tokens=joined.ragged(),
        learned=np.concatenate(learned),
        row_offsets=np.fromiter(accumulate(counts, initial=0), np.int64),
        rows=joined.rows,
        num_dropped=chats.limits.num_over,
        images=chats.images,
    )


@frozen(kw_only=True, eq=False)
class _Segment:
    """A part of a chat in which the template only ever adds."""

    opening: str
    """The policy's input before its first turn there."""
    said: list[str] = field(factory=list)
    learned: list[bool] = field(factory=list)
    """For each of its turns: True where it is learned."""
    between: list[str] = field(factory=list)
    """The policy's input between one turn and the next, one fewer than turns."""
    shown: str
    """All of it."""
    images: tuple[bytes, ...] = ()
    """Its images, in order."""


def _segments(row: spi.Row, tokenizer: Tokenizer, config: DatasetConfig, history: str) -> list[_Segment]:
    """A row's chat as the policy would see it, in text; DataError says why it is none."""
    messages, tools = _messages(row, config), read_tools(row.get("tools"))
    segments: list[_Segment] = []
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        opened = tokenizer.render_chat(messages[:number], tools)
        whole = tokenizer.render_answered(messages[: number + 1], tools)
        require_shown(message, whole, opened, f"message {number}")
        answer = ended_answer(whole, opened, messages[: number + 1], tools, tokenizer, messages[number + 1 :])
        is_learned = "weight" not in message
        before, images = segments[-1] if segments else None, images_of(messages[:number])
        if before is not None and opened.startswith(before.shown):
            added = opened[len(before.shown) :]
            segments[-1] = _Segment(
                opening=before.opening,
                said=[*before.said, answer],
                learned=[*before.learned, is_learned],
                between=[*before.between, added],
                shown=f"{before.shown}{added}{answer}",
                images=images,
            )
        elif before is None or history == "segment":
            segment = _Segment(opening=opened, said=[answer], learned=[is_learned], shown=opened + answer, images=images)
            segments.append(segment)
        else:
            raise spi.DataError(
                f"the chat template rewrites what it had shown once message {number} is to be answered; expected it to add "
                'only. Learn such chats in several sequences, each as the policy sees it, with rollout.history = "segment"'
            )
    return [segment for segment in segments if any(segment.learned)]


def _read(content: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """A message's texts and images with the files of these, which are rendered more than once."""
    return [{"type": "image", "image": image_file(part["image"])} if part["type"] == "image" else part for part in content]


def _messages(row: spi.Row, config: DatasetConfig) -> list[Mapping[str, Any]]:
    """A row's messages; DataError where they are no chat with an answer."""
    name = config.messages_field
    found = row.get(name)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        what = f"no field {name!r}" if name not in row else f"{type(found).__name__} {found!r:.60} as {name!r}"
        raise spi.DataError(f"found {what}; expected a list of chat messages (data.*.messages_field)")
    messages: list[Mapping[str, Any]] = []
    for number, message in enumerate(read_messages(found, may_begin=False)):
        content, is_answer = message["content"], message["role"] == ASSISTANT
        if is_answer and not isinstance(content, str):
            raise spi.DataError(f"message {number}, the assistant's, has an image; expected text")
        if is_answer and not (content.strip() or message.get("tool_calls") or thought_of(message)):
            raise spi.DataError(f"message {number}, the assistant's, is empty; expected an answer")
        messages.append(message if isinstance(content, str) else {**message, "content": _read(content)})
    roles = [message["role"] for message in messages]
    if ASSISTANT not in roles:
        raise spi.DataError(f"none of its {len(roles)} messages is the assistant's, but of {', '.join(sorted({*roles}))}")
    if all("weight" in message for message in messages if message["role"] == ASSISTANT):
        raise spi.DataError(f"each of the assistant's messages is left out by {', '.join(IN_LOSS)}; expected one to learn")
    if roles[0] == ASSISTANT:
        raise spi.DataError("its first message is the assistant's; expected one before it, which it answers")
    return messages


def _tokens(segment: _Segment, tokenizer: Tokenizer, eos: int) -> tuple[list[int], BoolArray]:
    """A segment's tokens, and which of them are the policy's."""
    (opening,) = encode_prompt_texts([segment.opening], [True], tokenizer)
    behind = tokenizer.encode_behind([*segment.said, *segment.between])
    tokens, mask = list(opening), [np.zeros(len(opening), np.bool_)]
    for number, said in enumerate(behind[: len(segment.said)]):
        if number:
            read = behind[len(segment.said) + number - 1]
            tokens += read
            mask.append(np.zeros(len(read), np.bool_))
        answer = ended(said, tokenizer, eos, is_chat=True)
        tokens += answer
        mask.append(np.full(len(answer), segment.learned[number]))
    return tokens, np.concatenate(mask)

"""Record of a session: a tree of answers, whose leaves become sequences to train on."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from rlcore.spi import Message, SamplingMask
from rlcore.spi.arrays import Int32Array
from rlcore_serve.sessions.interface import Sample, Segment
from rlcore_text.chats.conversation import Conversation

NOT_GENERATED = -1
"""The weight version of a token that the model only read."""


@frozen(kw_only=True, eq=False)
class Answer:
    """A node of the tree: one answer, and what the model read before it since the answer that it follows."""

    parent: "Answer | None"
    read: Int32Array
    """int32 [length]: tokens between the parent's and this answer's own."""
    sample: Sample
    conversation: Conversation | None = None
    """All messages before this answer, those of the model as it said them; None where the prompt was text or tokens."""
    prompt: str | None = None
    """The prompt where it was text."""
    length: int = field(init=False)
    """Tokens from the first prompt to the end of this answer."""

    @length.default
    def _length(self) -> int:
        return (0 if self.parent is None else self.parent.length) + len(self.read) + len(self.sample.tokens)

    @property
    def whole_text(self) -> str:
        """The prompt as text, and the answer's."""
        return (self.prompt or "") + self.sample.text

    def path(self) -> "list[Answer]":
        """Return the answers from the first one of the conversation to this one."""
        path, node = [], self
        while True:
            path.append(node)
            if node.parent is None:
                return path[::-1]
            node = node.parent

    def context(self) -> Int32Array:
        """Return int32 [length]: all that the model had read and said when this answer ended."""
        return np.concatenate([piece for answer in self.path() for piece in (answer.read, answer.sample.tokens)])


class Record:
    """The answers of one session."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []
        self._by_key: dict[str, Answer] = {}

    def add(self, answer: Answer, key: str | None) -> None:
        """Record an answer that conversations whose key is this one continue; none do where the key is None."""
        self._answers.append(answer)
        if key is not None:
            self._by_key[key] = answer

    def longest_known(self, keys: Sequence[str]) -> tuple[int, Answer | None]:
        """Return how many of a conversation's messages are known, given the key after each, and the answer that they end with;
        0 and None where the conversation begins anew."""
        for number in range(len(keys), 0, -1):
            answer = self._by_key.get(keys[number - 1])
            if answer is not None:
                return number, answer
        return 0, None

    def continued_text(self, prompt: str) -> Answer | None:
        """Return the answer to a plain text with which, behind its prompt, another one begins; the longest one."""
        texts = [one for one in self._answers if one.prompt is not None]
        found = [one for one in texts if prompt.startswith(one.whole_text)]
        return max(found, key=lambda one: len(one.whole_text), default=None)

    def continued_tokens(self, prompt: Int32Array) -> Answer | None:
        """Return the answer whose context a prompt begins with, token for token; the longest one."""
        texts = sorted((one for one in self._answers if one.conversation is None), key=lambda one: -one.length)
        return next(
            (one for one in texts if one.length <= len(prompt) and np.array_equal(one.context(), prompt[: one.length])), None
        )

    def segments(self) -> list[Segment]:
        """Return a sequence for each leaf. An answer that several of them share is in the loss of the first one alone."""
        inner = {id(answer.parent) for answer in self._answers}
        counted: set[int] = set()
        segments = []
        for leaf in self._answers:
            if id(leaf) not in inner:
                path = leaf.path()
                segments.append(_segment(path, [id(answer) not in counted for answer in path]))
                counted |= {id(answer) for answer in path}
        return segments


def conversation_keys(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> list[str]:
    """Return the key after each message of a conversation, which a template with these variables shows. Ids of tool calls and
    the order of keys do not count."""
    key, keys = _hash("", [*tools, dict(variables)]), []
    for message in messages:
        key = _hash(key, _identity(message))
        keys.append(key)
    return keys


def _identity(message: Message) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id")}
    return {**kept, "tool_calls": calls}


def _hash(before: str, value: object) -> str:
    text = before + json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _segment(path: Sequence[Answer], counts: Sequence[bool]) -> Segment:
    """The sequence of these answers; `counts`: which of them are in its loss."""
    tokens, masks, logprobs, versions, kept = [], [], [], [], []
    for answer, is_new in zip(path, counts, strict=True):
        num_read, num_said = len(answer.read), len(answer.sample.tokens)
        tokens += [answer.read, answer.sample.tokens]
        masks += [np.zeros(num_read, np.bool_), np.full(num_said, is_new, np.bool_)]
        logprobs += [np.zeros(num_read, np.float32), answer.sample.logprobs]
        versions += [np.full(num_read, NOT_GENERATED, np.int32), answer.sample.weight_versions]
        kept += [SamplingMask.whole(num_read), answer.sample.sampling_mask or SamplingMask.whole(num_said)]
    return Segment(
        tokens=np.concatenate(tokens),
        loss_mask=np.concatenate(masks),
        logprobs=np.concatenate(logprobs),
        weight_versions=np.concatenate(versions),
        finish_reason=path[-1].sample.finish_reason,
        text="".join(answer.sample.text for answer in path),
        sampling_mask=SamplingMask.join(kept),
    )

"""OpenAI's JSON of answers, whole or as the chunks of a stream."""

import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from attrs import frozen

from rlcore.spi import ChatTokenizer, FinishReason
from rlcore_serve.sessions.interface import Sample
from rlcore_serve.sessions.requests import AnswerRequest
from rlcore_serve.sessions.served_model import Answered, Choice, assistant_message

REPLACEMENT = "\ufffd"
"""The replacement for bytes that are no character."""


@frozen(kw_only=True, eq=False)
class Reply:
    """The reply to one request."""

    request: AnswerRequest
    answered: Answered
    tokenizer: ChatTokenizer
    model: str

    def whole(self) -> dict[str, Any]:
        """Return the reply as one JSON object."""
        choices = [self._choice(number, choice) for number, choice in enumerate(self.answered.choices)]
        return {**self._head(""), **self._prompt_of(is_chat=True), "choices": choices, "usage": self._usage()}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the reply as the chunks of a stream: each answer comes whole, since its generator hands it out at its end."""
        head = {**self._head(".chunk"), **self._prompt_of(is_chat=True)}
        for number, choice in enumerate(self.answered.choices):
            content = self._choice(number, choice)
            if self._is_chat:
                message = content.pop("message")
                calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", ()))]
                content["delta"] = {**message, "tool_calls": calls} if calls else message
            reason, content["finish_reason"] = content["finish_reason"], None
            yield {**head, "choices": [content]}
            last: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            last |= {"index": number, "finish_reason": reason}
            yield {**head, "choices": [last]}
        if self.request.include_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    @property
    def _is_chat(self) -> bool:
        return self.request.prompt is None

    def _head(self, kind: str) -> dict[str, Any]:
        prefix, name = ("chatcmpl", f"chat.completion{kind}") if self._is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": name, "created": int(time.time()), "model": self.model}

    def _usage(self) -> dict[str, int]:
        said = sum(len(choice.sample.tokens) for choice in self.answered.choices)
        read = len(self.answered.prompt)
        return {"prompt_tokens": read, "completion_tokens": said, "total_tokens": read + said}

    def _prompt_of(self, *, is_chat: bool) -> dict[str, Any]:
        """The prompt's tokens, where other servers have them: beside the choices of a chat, within each of a completion."""
        wanted = self.request.return_token_ids and is_chat == self._is_chat
        return {"prompt_token_ids": self.answered.prompt.tolist()} if wanted else {}

    def _choice(self, number: int, choice: Choice) -> dict[str, Any]:
        content = self._content(number, choice) | ({"begins_in_thought": True} if choice.begins_in_thought else {})
        if self.request.return_token_ids:
            content |= {**self._prompt_of(is_chat=False), "token_ids": choice.sample.tokens.tolist()}
        return content

    def _content(self, number: int, choice: Choice) -> dict[str, Any]:
        reason = "length" if choice.sample.finish_reason is FinishReason.LENGTH else "stop"
        if not self._is_chat:
            logprobs = _text_logprobs(choice.sample, self.tokenizer) if self.request.logprobs else None
            return {"index": number, "text": choice.content, "logprobs": logprobs, "finish_reason": reason}
        ids = [f"call_{uuid.uuid4().hex[:24]}" for _ in choice.tool_calls]
        return {
            "index": number,
            "message": assistant_message(choice, ids),
            "logprobs": {"content": chat_logprobs(choice.sample, self.tokenizer)} if self.request.logprobs else None,
            "finish_reason": "tool_calls" if choice.tool_calls else reason,
        }


def _pairs(sample: Sample, tokenizer: ChatTokenizer) -> list[tuple[str, float]]:
    shown = [tokenizer.show([token]) for token in sample.tokens.tolist()]
    return list(zip(shown, sample.logprobs.tolist(), strict=True))


def chat_logprobs(sample: Sample, tokenizer: ChatTokenizer) -> Sequence[dict[str, Any]]:
    """Return OpenAI's log-probabilities of an answer's tokens."""
    return [
        {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
        for text, logprob in _pairs(sample, tokenizer)
    ]


def _bytes(text: str) -> list[int] | None:
    """A token's bytes; None where it is a part of a character, whose bytes its text does not show."""
    return None if REPLACEMENT in text else list(text.encode())


def _text_logprobs(sample: Sample, tokenizer: ChatTokenizer) -> dict[str, Any]:
    pairs = _pairs(sample, tokenizer)
    offsets = list(accumulate((len(text) for text, _ in pairs), initial=0))[:-1]
    return {
        "tokens": [text for text, _ in pairs],
        "token_logprobs": [logprob for _, logprob in pairs],
        "top_logprobs": None,
        "text_offset": offsets,
    }

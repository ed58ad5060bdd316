"""OpenAI's JSON of answers, whole or as the chunks of a stream."""

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from attrs import define, field, frozen

from rlcore.spi import ChatTokenizer, FinishReason
from rlcore.spi.arrays import Int32Array
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.live_text import REPLACEMENT, Piece
from rlcore_serve.sessions.requests import AnswerRequest
from rlcore_serve.sessions.served_model import REASONING, Answered, Choice, assistant_message

LEAST_LOGPROB = -9999.0
"""JSON has no -inf; vLLM's server says this."""


@frozen(kw_only=True, eq=False)
class Logprob:
    """A sampled token, its log-probability, and those of the most probable tokens."""

    token: int
    logprob: float
    top: Mapping[int, float]


@define(kw_only=True, eq=False)
class TokensOfChoice:
    """The tokens of one answer that a stream has not sent yet."""

    num_sent: int = 0
    waiting: list[int] = field(factory=list)
    logprobs: list[Logprob] = field(factory=list)

    def add(self, tokens: Sequence[int], rows: Sequence[Mapping[int, float]]) -> None:
        """Take more tokens, with log-probabilities of each where the request asks for them."""
        self.waiting += tokens
        self.logprobs += [Logprob(token=token, logprob=row[token], top=row) for token, row in zip(tokens, rows, strict=False)]

    def finish(self, choice: Choice) -> None:
        """Take what the whole answer has besides."""
        self.waiting = choice.sample.tokens[self.num_sent :].tolist()
        self.logprobs = logprobs_of(choice)[self.num_sent :]

    def take(self) -> tuple[list[int], list[Logprob]]:
        """Return what has not been sent, as sent now."""
        taken = self.waiting, self.logprobs
        self.num_sent += len(self.waiting)
        self.waiting, self.logprobs = [], []
        return taken


@define(kw_only=True, eq=False)
class Reply:
    """The reply to one request for a chat or a completion."""

    request: AnswerRequest
    prompt: Int32Array
    """int32 [length]"""
    tokenizer: ChatTokenizer
    model: str
    _id: str = field(factory=lambda: uuid.uuid4().hex, init=False)
    _sent: list[TokensOfChoice] = field(factory=list, init=False)
    """The tokens that a stream has sent of each answer that has begun."""
    last_event: bytes = field(default=b"data: [DONE]\n\n", init=False)

    def whole(self, answered: Answered) -> dict[str, Any]:
        """Return the reply as one JSON object."""
        choices = [self._choice(number, choice) for number, choice in enumerate(answered.choices)]
        if answered.prompt_logprobs is not None:
            scored = self._prompt_logprobs(answered.prompt_logprobs)
            choices = [{**choice, "prompt_logprobs": scored} for choice in choices]
        return {**self._head(""), **self._prompt_of(is_chat=True), "choices": choices, "usage": self._usage(answered)}

    def more(
        self, number: int, pieces: Sequence[Piece], tokens: Sequence[int], rows: Sequence[Mapping[int, float]]
    ) -> Iterator[dict[str, Any]]:
        """Yield the chunks of a stream that more tokens of an answer bring."""
        yield from self._begin(number)
        self._sent[number].add(tokens, rows)
        yield from self._pieces(number, pieces)

    def end(self, answered: Answered, pieces: Sequence[Sequence[Piece]]) -> Iterator[dict[str, Any]]:
        """Yield the last chunks of a stream, with the pieces of each answer that have not been sent."""
        for number, choice in enumerate(answered.choices):
            yield from self._begin(number)
            self._sent[number].finish(choice)
            yield from self._pieces(number, pieces[number])
            content = self._choice(number, choice)
            if self._is_chat:
                calls = content["message"].get("tool_calls", ())
                for index, call in enumerate(calls):
                    function = {"name": call["function"]["name"], "arguments": ""}
                    yield self._chunk(number, {"tool_calls": [{"index": index, **call, "function": function}]})
                    part = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
                    yield self._chunk(number, {"tool_calls": [part]})
            yield self._chunk(number, {} if self._is_chat else "", content["finish_reason"])
        if self.request.include_usage:
            yield {**self._head(".chunk"), "choices": [], "usage": self._usage(answered)}

    def failed(self, error: RequestError) -> dict[str, Any]:
        """Return the chunk that ends a stream with an error."""
        return error.body()

    @property
    def _is_chat(self) -> bool:
        return self.request.prompt is None

    def _begin(self, number: int) -> Iterator[dict[str, Any]]:
        while len(self._sent) <= number:
            self._sent.append(TokensOfChoice())
            if self._is_chat:
                yield self._chunk(len(self._sent) - 1, {"role": "assistant", "content": ""})

    def _pieces(self, number: int, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        for kind, text in pieces:
            names = REASONING if kind == "reasoning" else ("content",)
            yield self._chunk(number, dict.fromkeys(names, text) if self._is_chat else text)

    def _chunk(self, number: int, delta: dict[str, Any] | str, reason: str | None = None) -> dict[str, Any]:
        """Return a chunk of one answer, with the tokens that have not been sent, unless it begins the answer."""
        choice: dict[str, Any] = {"index": number, "finish_reason": reason, "logprobs": None}
        choice["delta" if self._is_chat else "text"] = delta
        is_first = isinstance(delta, dict) and "role" in delta
        offset = self._sent[number].num_sent
        tokens, logprobs = ([], []) if is_first else self._sent[number].take()
        if self.request.logprobs and logprobs:
            shown = {"content": chat_logprobs(logprobs, self.tokenizer, self.request.top_logprobs)}
            choice["logprobs"] = shown if self._is_chat else self._text_logprobs(logprobs)
        if self.request.return_token_ids and not is_first:
            choice |= {**(self._prompt_of(is_chat=False) if not offset else {}), "token_ids": tokens}
        return {**self._head(".chunk"), **(self._prompt_of(is_chat=True) if is_first else {}), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix, name = ("chatcmpl", f"chat.completion{kind}") if self._is_chat else ("cmpl", "text_completion")
        return {"id": f"{prefix}-{self._id}", "object": name, "created": int(time.time()), "model": self.model}

    def _usage(self, answered: Answered) -> dict[str, int]:
        said = sum(len(choice.sample.tokens) for choice in answered.choices)
        return {"prompt_tokens": len(self.prompt), "completion_tokens": said, "total_tokens": len(self.prompt) + said}

    def _prompt_of(self, *, is_chat: bool) -> dict[str, Any]:
        """The prompt's tokens, where other servers have them: beside the choices of a chat, within each of a completion."""
        wanted = self.request.return_token_ids and is_chat == self._is_chat
        return {"prompt_token_ids": self.prompt.tolist()} if wanted else {}

    def _choice(self, number: int, choice: Choice) -> dict[str, Any]:
        content = self._content(number, choice) | ({"begins_in_thought": True} if choice.begins_in_thought else {})
        if self.request.return_token_ids:
            content |= {**self._prompt_of(is_chat=False), "token_ids": choice.sample.tokens.tolist()}
        return content

    def _content(self, number: int, choice: Choice) -> dict[str, Any]:
        reason = "length" if choice.sample.finish_reason is FinishReason.LENGTH else "stop"
        if not self._is_chat:
            logprobs = self._text_logprobs(logprobs_of(choice)) if self.request.logprobs else None
            return {"index": number, "text": choice.content, "logprobs": logprobs, "finish_reason": reason}
        ids = [f"call_{uuid.uuid4().hex[:24]}" for _ in choice.tool_calls]
        found = chat_logprobs(logprobs_of(choice), self.tokenizer, self.request.top_logprobs) if self.request.logprobs else None
        return {
            "index": number,
            "message": assistant_message(choice, ids),
            "logprobs": None if found is None else {"content": found},
            "finish_reason": "tool_calls" if choice.tool_calls else reason,
        }

    def _prompt_logprobs(self, rows: Sequence[Mapping[int, float]]) -> list[dict[str, Any] | None]:
        """Return vLLM's entries of the prompt's tokens, of which the first has none. A token that is not among the most
        probable ones has the rank None."""
        entries: list[dict[str, Any] | None] = [None]
        for token, row in zip(self.prompt[1:].tolist(), rows, strict=True):
            most = [one for one, _ in _most(Logprob(token=token, logprob=row[token], top=row), len(row))]
            ranks = {one: rank for rank, one in enumerate(most[: self.request.prompt_logprobs], start=1)}
            entries.append(
                {
                    str(one): {
                        "logprob": max(row[one], LEAST_LOGPROB),
                        "rank": ranks.get(one),
                        "decoded_token": self.tokenizer.show([one]),
                    }
                    for one in dict.fromkeys((token, *ranks))
                }
            )
        return entries

    def _text_logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        shown = [self.tokenizer.show([one.token]) for one in logprobs]
        count = self.request.top_logprobs
        tops = [{self.tokenizer.show([token]): logprob for token, logprob in _most(one, count)} for one in logprobs]
        return {
            "tokens": shown,
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": tops if count and any(tops) else None,
            "text_offset": list(accumulate((len(text) for text in shown), initial=0))[:-1],
        }


def logprobs_of(choice: Choice) -> list[Logprob]:
    """Return the log-probabilities of an answer's tokens."""
    pairs = zip(choice.sample.tokens.tolist(), choice.sample.logprobs.tolist(), strict=True)
    tops = [*choice.top_logprobs, *[{}] * (len(choice.sample.tokens) - len(choice.top_logprobs))]
    return [Logprob(token=token, logprob=logprob, top=top) for (token, logprob), top in zip(pairs, tops, strict=True)]


def chat_logprobs(logprobs: Sequence[Logprob], tokenizer: ChatTokenizer, num_top: int) -> list[dict[str, Any]]:
    """Return OpenAI's log-probabilities of tokens, each with the `num_top` most probable ones."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.show([token])
        return {"token": text, "logprob": logprob, "bytes": _bytes(text)}

    return [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(token, logprob) for token, logprob in _most(one, num_top)]}
        for one in logprobs
    ]


def _most(one: Logprob, count: int) -> list[tuple[int, float]]:
    """The most probable tokens, in order."""
    return sorted(one.top.items(), key=lambda pair: -pair[1])[:count]


def _bytes(text: str) -> list[int] | None:
    """A token's bytes; None where it is a part of a character, whose bytes its text does not show."""
    return None if REPLACEMENT in text else list(text.encode())

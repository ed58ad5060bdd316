"""Replies of Anthropic's Messages API, whole or as the events of a stream."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from rlcore.spi import ChatTokenizer, FinishReason, ToolCall
from rlcore.spi.arrays import Int32Array
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.live_text import Piece
from rlcore_serve.sessions.requests import AnswerRequest
from rlcore_serve.sessions.served_model import Answered, Choice

_DELTAS = {"reasoning": ("thinking_delta", "thinking"), "content": ("text_delta", "text")}


@define(kw_only=True, eq=False)
class MessageReply:
    """The one answer to a request."""

    request: AnswerRequest
    prompt: Int32Array
    """int32 [length]"""
    tokenizer: ChatTokenizer
    model: str
    last_event: bytes = field(default=b"", init=False)
    _id: str = field(factory=lambda: f"msg_{uuid.uuid4().hex}", init=False)
    _has_begun: bool = field(default=False, init=False)
    _open: str = field(default="", init=False)
    """The block whose text a stream sends, "reasoning" or "content"; "" for none."""
    _num_blocks: int = field(default=0, init=False)

    def whole(self, answered: Answered) -> dict[str, Any]:
        """Return the reply as one JSON object."""
        (choice,) = answered.choices
        return self._message(_blocks(choice), self._stop(choice), len(choice.sample.tokens))

    def more(
        self,
        number: int,  # noqa: ARG002 - there is one answer
        pieces: Sequence[Piece],
        tokens: Sequence[int],  # noqa: ARG002 - events have no tokens
        rows: Sequence[Mapping[int, float]],  # noqa: ARG002 - nor log-probabilities
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream that more tokens bring."""
        yield from self._begin()
        for kind, text in pieces:
            if kind != self._open:
                yield from self._close()
                yield from self._start(kind)
            name, key = _DELTAS[kind]
            yield {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": {"type": name, key: text}}

    def end(self, answered: Answered, pieces: Sequence[Sequence[Piece]]) -> Iterator[dict[str, Any]]:
        """Yield the last events of a stream."""
        (choice,) = answered.choices
        yield from self.more(0, pieces[0], (), ())
        yield from self._close()
        for call in choice.tool_calls:
            block = _tool_use(call)
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            index, self._num_blocks = self._num_blocks, self._num_blocks + 1
            yield {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        usage = {"input_tokens": len(self.prompt), "output_tokens": len(choice.sample.tokens)}
        yield {"type": "message_delta", "delta": self._stop(choice), "usage": usage}
        yield {"type": "message_stop"}

    def failed(self, error: RequestError) -> dict[str, Any]:
        """Return the event that ends a stream with an error."""
        return error.message_body()

    def _begin(self) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            message = self._message([], {"stop_reason": None, "stop_sequence": None}, 0)
            yield {"type": "message_start", "message": message}

    def _start(self, kind: str) -> Iterator[dict[str, Any]]:
        self._open = kind
        block = _thinking("") if kind == "reasoning" else {"type": "text", "text": ""}
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        self._num_blocks += 1

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._open:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
        self._open = ""

    def _message(self, content: list[dict[str, Any]], stop: Mapping[str, Any], num_tokens: int) -> dict[str, Any]:
        usage = {"input_tokens": len(self.prompt), "output_tokens": num_tokens}
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **stop, "usage": usage}

    def _stop(self, choice: Choice) -> dict[str, Any]:
        """Return why the answer ended."""
        if choice.tool_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if choice.sample.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        text = choice.sample.text
        found = [stop for stop in self.request.sampling.stop_strings if stop in text]
        stop = min(found, key=text.index, default=None)
        return {"stop_reason": "end_turn" if stop is None else "stop_sequence", "stop_sequence": stop}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    """The blocks of an answer: its thought, its text, its calls."""
    thought = [_thinking(choice.reasoning)] if choice.reasoning else []
    text = [{"type": "text", "text": choice.content}] if choice.content else []
    return [*thought, *text, *map(_tool_use, choice.tool_calls)]


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name, "input": dict(call.arguments)}

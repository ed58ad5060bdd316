"""The reply to a request of OpenAI's Responses API."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from rlcore.spi import ChatTokenizer, FinishReason, ToolCall
from rlcore.spi.arrays import Int32Array
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.live_text import Piece
from rlcore_serve.sessions.replies import TokensOfChoice, chat_logprobs, logprobs_of
from rlcore_serve.sessions.requests import AnswerRequest
from rlcore_serve.sessions.served_model import Answered, Choice

FIRST_CALL = "call_first"
"""Begins the `call_id` of a call that begins its answer: clients send answers back item by item, and a message that is
of no answer may stand before it."""


@define(kw_only=True, eq=False)
class ResponseReply:
    """The one answer to a request."""

    body: Mapping[str, Any]
    """The request as it came."""
    request: AnswerRequest
    prompt: Int32Array
    """int32 [length]"""
    tokenizer: ChatTokenizer
    model: str
    _head: Mapping[str, Any] = field(init=False)
    _ids: Mapping[str, str] = field(factory=lambda: {"reasoning": _id("rs"), "content": _id("msg")}, init=False)
    """The ids of the items that have text."""
    _num_events: int = field(default=0, init=False)
    _open: str = field(default="", init=False)
    """The item whose text a stream sends, "reasoning" or "content"; "" for none."""
    _texts: dict[str, str] = field(factory=dict, init=False)
    """The text that a stream has sent of each item, by kind."""
    _tokens: TokensOfChoice = field(factory=TokensOfChoice, init=False)
    last_event: bytes = field(default=b"data: [DONE]\n\n", init=False)

    @_head.default
    def _default_head(self) -> Mapping[str, Any]:
        return {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": self.model}

    def whole(self, answered: Answered) -> dict[str, Any]:
        """Return the reply as one JSON object."""
        (choice,) = answered.choices
        is_cut = choice.sample.finish_reason is FinishReason.LENGTH
        return {
            **self._head,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "output": self._output(choice, "incomplete" if is_cut else "completed"),
            "usage": self._usage(choice),
            **self._asked(),
        }

    def more(
        self,
        number: int,  # noqa: ARG002 - there is one answer
        pieces: Sequence[Piece],
        tokens: Sequence[int],
        rows: Sequence[Mapping[int, float]],
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a stream that more tokens bring."""
        yield from self._numbered(self._begin())
        self._tokens.add(tokens, rows)
        yield from self._numbered(self._pieces(pieces))

    def end(self, answered: Answered, pieces: Sequence[Sequence[Piece]]) -> Iterator[dict[str, Any]]:
        """Yield the last events of a stream."""
        yield from self._numbered(self._last(self.whole(answered), answered.choices[0], pieces[0]))

    def failed(self, error: RequestError) -> dict[str, Any]:
        """Return the event that ends a stream with an error."""
        return {"type": "error", "code": error.code, "message": str(error), "param": None, "sequence_number": self._num_events}

    def _numbered(self, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            yield {**event, "sequence_number": self._num_events}
            self._num_events += 1

    def _begin(self) -> Iterator[dict[str, Any]]:
        if not self._num_events:
            begun: dict[str, Any] = {
                "status": "in_progress",
                "incomplete_details": None,
                "error": None,
                "output": [],
                "usage": None,
            }
            response = {**self._head, **begun, **self._asked()}
            yield from ({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        for kind, text in pieces:
            if kind != self._open:
                yield from self._close()
                yield from self._open_item(kind)
            self._texts[kind] += text
            if kind == "reasoning":
                yield {"type": "response.reasoning_text.delta", **self._place(), "delta": text}
            else:
                logprobs = chat_logprobs(self._tokens.take()[1], self.tokenizer, self.request.top_logprobs)
                yield {"type": "response.output_text.delta", **self._place(), "delta": text, "logprobs": logprobs}

    def _open_item(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the events that begin an item with text."""
        self._open, self._texts[kind] = kind, ""
        item = self._reasoning("", "in_progress") if kind == "reasoning" else self._message("", [], "in_progress")
        (part,) = item["content"]
        index = len(self._texts) - 1
        yield {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}}
        yield {"type": "response.content_part.added", **self._place(), "part": part}

    def _close(self, item: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """Yield the events that end the open item, if there is one; `item` is its last form where that is known."""
        if not self._open:
            return
        kind, text, place = self._open, self._texts[self._open], self._place()
        if item is None:
            item = self._reasoning(text, "completed") if kind == "reasoning" else self._message(text, [], "completed")
        (part,) = item["content"]
        if kind == "reasoning":
            yield {"type": "response.reasoning_text.done", **place, "text": text}
        else:
            yield {"type": "response.output_text.done", **place, "text": text, "logprobs": part.get("logprobs", [])}
        yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": place["output_index"], "item": item}
        self._open = ""

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._ids[self._open], "output_index": list(self._texts).index(self._open), "content_index": 0}

    def _last(self, whole: dict[str, Any], choice: Choice, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        yield from self._begin()
        self._tokens.finish(choice)
        yield from self._pieces(pieces)
        for index, item in enumerate(whole["output"]):
            if item["type"] == "function_call":
                place = {"item_id": item["id"], "output_index": index}
                begun = {**item, "arguments": "", "status": "in_progress"}
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield {"type": "response.output_item.added", "output_index": index, "item": begun}
                yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
                yield {"type": "response.function_call_arguments.done", **place, **done}
                yield {"type": "response.output_item.done", "output_index": index, "item": item}
                continue
            kind = "reasoning" if item["type"] == "reasoning" else "content"
            if kind not in self._texts:
                yield from self._open_item(kind)
            if kind == self._open:
                yield from self._close(item)
        yield {"type": f"response.{whole['status']}", "response": whole}

    def _output(self, choice: Choice, status: str) -> list[dict[str, Any]]:
        """The thought, a message unless there are calls alone, and the calls."""
        thought = [self._reasoning(choice.reasoning, "completed")] if choice.reasoning else []
        logprobs = (
            chat_logprobs(logprobs_of(choice), self.tokenizer, self.request.top_logprobs) if self.request.logprobs else []
        )
        has_message = bool(choice.content) or not choice.tool_calls
        message = [self._message(choice.content, logprobs, status)] if has_message else []
        begins = not (message or thought)
        calls = [
            _call_item(call, FIRST_CALL if begins and not number else "call") for number, call in enumerate(choice.tool_calls)
        ]
        return [*thought, *message, *calls]

    def _reasoning(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "reasoning_text", "text": text}
        return {"type": "reasoning", "id": self._ids["reasoning"], "status": status, "summary": [], "content": [part]}

    def _message(self, text: str, logprobs: Sequence[Mapping[str, Any]], status: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if self.request.logprobs:
            part["logprobs"] = logprobs
        return {"type": "message", "id": self._ids["content"], "status": status, "role": "assistant", "content": [part]}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """Return the token counts. Cached tokens are not known, and thoughts are not told from the rest: the details are 0."""
        read, said = len(self.prompt), len(choice.sample.tokens)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + said,
        }

    def _asked(self) -> dict[str, Any]:
        """Return the request's fields that OpenAI's API repeats."""
        return {
            "instructions": self.body.get("instructions"),
            "max_output_tokens": self.body.get("max_output_tokens"),
            "metadata": self.body.get("metadata"),
            "parallel_tool_calls": self.body.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "temperature": self.request.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": self.body.get("tool_choice") or "auto",
            "tools": self.body.get("tools") or [],
            "top_p": self.request.sampling.top_p,
            "truncation": "disabled",
        }


def _call_item(call: ToolCall, prefix: str) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments))
    item = {"type": "function_call", "id": _id("fc"), "call_id": _id(prefix), "status": "completed"}
    return {**item, "name": call.name, "arguments": arguments}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"

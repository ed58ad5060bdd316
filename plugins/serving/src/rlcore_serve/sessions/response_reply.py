"""The reply to a request of OpenAI's Responses API."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import frozen

from rlcore.spi import ChatTokenizer, FinishReason, ToolCall
from rlcore_serve.sessions.replies import chat_logprobs
from rlcore_serve.sessions.requests import AnswerRequest
from rlcore_serve.sessions.served_model import Answered, Choice

FIRST_CALL = "call_first"
"""Begins the `call_id` of a call that begins its answer: clients send answers back item by item, and a message that is
of no answer may stand before it."""


@frozen(kw_only=True, eq=False)
class ResponseReply:
    """The one answer to a request."""

    body: Mapping[str, Any]
    """The request as it came."""
    request: AnswerRequest
    answered: Answered
    tokenizer: ChatTokenizer
    model: str

    def whole(self) -> dict[str, Any]:
        """Return the reply as one JSON object."""
        (choice,) = self.answered.choices
        is_cut = choice.sample.finish_reason is FinishReason.LENGTH
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "output": self._output(choice, "incomplete" if is_cut else "completed"),
            "usage": self._usage(choice),
            **self._asked(),
        }

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the reply as the events of a stream: each item comes whole, since its generator hands it out at its end."""
        for number, event in enumerate(self._events()):
            yield {**event, "sequence_number": number}

    def _events(self) -> Iterator[dict[str, Any]]:
        whole = self.whole()
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield from ({"type": f"response.{name}", "response": begun} for name in ("created", "in_progress"))
        for index, item in enumerate(whole["output"]):
            empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
            yield {
                "type": "response.output_item.added",
                "output_index": index,
                "item": {**item, **empty, "status": "in_progress"},
            }
            place = {"item_id": item["id"], "output_index": index}
            yield from ({**event, **place} for event in _item_events(item))
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        yield {"type": f"response.{whole['status']}", "response": whole}

    def _output(self, choice: Choice, status: str) -> list[dict[str, Any]]:
        """A message, unless there are calls alone, and the calls."""
        message = [self._message(choice, status)] if choice.content or not choice.tool_calls else []
        calls = [_call_item(call, "call" if number or message else FIRST_CALL) for number, call in enumerate(choice.tool_calls)]
        return [*message, *calls]

    def _message(self, choice: Choice, status: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "output_text", "text": choice.content, "annotations": []}
        if self.request.logprobs:
            part["logprobs"] = chat_logprobs(choice.sample, self.tokenizer)
        return {"type": "message", "id": _id("msg"), "status": status, "role": "assistant", "content": [part]}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """Return the token counts. Cached tokens are not known, and thoughts are not told from the rest: the details are 0."""
        read, said = len(self.answered.prompt), len(choice.sample.tokens)
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


def _item_events(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what a stream says of an item between its beginning and its end."""
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", "arguments": item["arguments"], "name": item["name"]}
        return
    (part,) = item["content"]
    place = {"content_index": 0}
    text = {**place, "logprobs": part.get("logprobs", [])}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **text, "delta": part["text"]}
    yield {"type": "response.output_text.done", **text, "text": part["text"]}
    yield {"type": "response.content_part.done", **place, "part": part}


def _call_item(call: ToolCall, prefix: str) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments))
    item = {"type": "function_call", "id": _id("fc"), "call_id": _id(prefix), "status": "completed"}
    return {**item, "name": call.name, "arguments": arguments}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"

"""A tokenizer of characters with ChatML's template, and a generator that says what a test has written."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlcore.spi import DataError, FinishReason, SamplingParams, capabilities
from rlcore_serve.sessions.interface import Sample, SampleRequest
from rlcore_serve.sessions.served_model import ServedModel
from rlcore_text.chats.tool_calls import ToolParser, hermes

START, END = "<|im_start|>", "<|im_end|>"
START_ID, END_ID = 1, 2
DEFAULT_SYSTEM = f"{START}system\nBe brief.{END}\n"


class ChatMl:
    """Token 2 ends a turn, and is no part of its text; other tokens are characters."""

    stop_token_ids = (END_ID,)
    prompt_prefix = ()

    def __init__(self, *, strips_thinking: bool = False, opens: str = "") -> None:
        """`opens` is what answers begin with."""
        self.strips_thinking = strips_thinking
        self.opens = opens
        self.num_messages = 0
        """Messages rendered so far."""

    def encode(self, text: str) -> list[int]:
        marked = text.replace(START, chr(START_ID)).replace(END, chr(END_ID))
        return [ord(character) for character in marked]

    def encode_behind(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token not in (START_ID, END_ID))

    def show(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens).replace(chr(START_ID), START).replace(chr(END_ID), END)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """A default system message, tools in front, and of assistants before the last user, with `strips_thinking`, what stands
        behind </think> alone."""
        self.num_messages += len(messages)
        if any(message["role"] == "forbidden" for message in messages):
            raise DataError("the chat template refuses the role 'forbidden'")
        text = "" if messages[0]["role"] == "system" else DEFAULT_SYSTEM
        text += f"tools: {json.dumps(list(tools))}\n" if tools else ""
        for number, message in enumerate(messages):
            content = message["content"]
            if self.strips_thinking and any(later["role"] == "user" for later in messages[number:]):
                content = content.rpartition("</think>")[2]
            calls = "".join(json.dumps(call["function"]) for call in message.get("tool_calls", ()))
            opens = self.opens if message["role"] == "assistant" else ""
            text += f"{START}{message['role']}\n{opens}{content}{calls}{END}\n"
        return f"{text}{START}assistant\n{self.opens}"

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatMl":
        """The variable `opens` is the only one."""
        if variables.keys() - {"opens"}:
            raise DataError("the chat template reads no such variable")
        return ChatMl(strips_thinking=self.strips_thinking, **variables) if variables else self


class Script:
    """Says the texts that it was given, one after another; one that ends with END stops there, any other by its length."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.requests: list[SampleRequest] = []
        self.waits = False
        self.num_given_up = 0
        """Samples that were cancelled while they waited."""
        self.tokenizer = ChatMl()
        self.version = 0

    async def sample(self, request: SampleRequest) -> Sample:
        self.requests.append(request)
        text = self.texts.pop(0)
        try:
            while self.waits:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        tokens = np.asarray(self.tokenizer.encode(text), np.int32)
        ends = text.endswith((END, *request.sampling.stop_strings))
        return Sample(
            text=self.tokenizer.decode(tokens.tolist()),
            tokens=tokens,
            logprobs=-np.arange(1, len(tokens) + 1, dtype=np.float32) / 8,
            weight_versions=np.full(len(tokens), self.version, np.int32),
            finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
        )


def served(script: Script, **options: Any) -> ServedModel:
    """A model that says a script."""
    defaults: dict[str, Any] = {
        "name": "policy",
        "tokenizer": script.tokenizer,
        "sampler": script,
        "max_sequence_length": 2000,
        "sampling": SamplingParams(stop_token_ids=(END_ID,)),
        "parse": ToolParser("hermes", hermes).parse,
        "tool_form": "hermes",
        "capabilities": frozenset({capabilities.STOP_STRINGS, capabilities.TOP_P, capabilities.TOP_K}),
    }
    return ServedModel(**defaults | options)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}

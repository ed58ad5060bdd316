"""Table of the keys of requests in OpenAI's API, and how the server treats each."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import frozen

Api = Literal["chat", "completions", "responses", "messages"]


@frozen(kw_only=True)
class Key:
    """Treatment of a key: which of its values the server takes."""

    only: tuple[object, ...] | None = None
    """Values that the server takes, besides null; None for all values."""
    why: str = "which is all that this server does"
    """End of the error message for any other value."""
    passed_over: Callable[[Any], bool] = lambda value: False  # noqa: ARG005
    """Returns whether the server takes another value and ignores it."""
    read: Callable[[Any], bool] = lambda value: False  # noqa: ARG005
    """Returns whether the server reads another value."""
    note: str = ""
    """Note for the log on a value that is ignored."""


def _has_effort(config: Any) -> bool:
    return isinstance(config, dict) and not config.keys() - {"format", "effort"}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def names_function(choice: Any) -> bool:
    """Return whether a `tool_choice` is an object that names a function, in the form of a chat or of the Responses API."""
    is_function = isinstance(choice, dict) and choice.get("type") == "function"
    return is_function and isinstance(choice.get("function", choice), dict)


def _has_verbosity(text: Any) -> bool:
    return isinstance(text, dict) and not text.keys() - {"format", "verbosity"}


def _is_format(text: Any) -> bool:
    """Return whether a `text` or an `output_config` has nothing but a `format`."""
    return isinstance(text, dict) and not text.keys() - {"format"}


_READ = Key()
_NO_EFFECT = Key()
"""A key whose values change no answer."""
_HINT = Key(
    only=(),
    why="but text",
    passed_over=_is_text,
    note="a chat template that reads such a variable gets it by chat_template_kwargs",
)
_TOOL_CHOICE = Key(
    only=("auto", "none", "required"),
    why="or an object that names a function of tools; to allow some tools alone, send those alone",
    read=names_function,
)
_PARALLEL = Key(only=(True,), passed_over=lambda value: value is False, note="an answer may have several calls all the same")

_ALL: Mapping[str, Key] = {
    "metadata": _NO_EFFECT,
    "model": _READ,
    "prompt_cache_key": _NO_EFFECT,
    "prompt_cache_options": _NO_EFFECT,
    "prompt_cache_retention": _NO_EFFECT,
    "safety_identifier": _NO_EFFECT,
    "seed": _READ,
    "service_tier": _NO_EFFECT,
    "stop": _READ,
    "store": _NO_EFFECT,
    "temperature": _READ,
    "top_p": _READ,
    "user": _NO_EFFECT,
    # Not in OpenAI's API: keys of other inference servers, and of this one
    "add_generation_prompt": Key(only=(True,)),
    "continue_final_message": Key(only=(False,)),
    "ignore_eos": _READ,
    "include_stop_str_in_output": Key(only=(False,)),
    "min_p": Key(only=(0,)),
    "min_tokens": Key(only=(0,)),
    "record": _READ,
    "repetition_penalty": Key(only=(1,)),
    "skip_special_tokens": Key(only=(True,)),
    "stop_token_ids": _READ,
    "top_k": _READ,
}
_SAMPLED: Mapping[str, Key] = {
    "best_of": Key(only=(1,)),
    "echo": Key(only=(False,)),
    "frequency_penalty": Key(only=(0,)),
    "logit_bias": Key(only=({},)),
    "logprobs": _READ,
    "max_tokens": _READ,
    "n": _READ,
    "presence_penalty": Key(only=(0,)),
    "return_token_ids": _READ,
    "stream": _READ,
    "stream_options": _READ,
    "top_logprobs": Key(only=(0,)),
}
"""Keys of chats and completions."""
_TOOLS: Mapping[str, Key] = {
    "chat_template_kwargs": _READ,
    "moderation": Key(only=(), why="since this server moderates nothing"),
    "parallel_tool_calls": _PARALLEL,
    "tool_choice": _TOOL_CHOICE,
    "tools": _READ,
}
"""Keys of chats and of the Responses API."""
KEYS: Mapping[Api, Mapping[str, Key]] = {
    "chat": {
        **_ALL,
        **_SAMPLED,
        **_TOOLS,
        "audio": Key(only=(), why="since this server answers with text"),
        "function_call": Key(only=("auto", "none"), why="in place of which `tool_choice` stands"),
        "functions": Key(only=([],), why="in place of which `tools` stand"),
        "max_completion_tokens": _READ,
        "messages": _READ,
        "modalities": Key(only=(["text"],)),
        "prediction": _NO_EFFECT,
        "reasoning_effort": _HINT,
        "response_format": _READ,
        "top_logprobs": _READ,
        "verbosity": _HINT,
        "web_search_options": Key(only=(), why="since this server searches nothing"),
    },
    "completions": {**_ALL, **_SAMPLED, "prompt": _READ, "prompt_logprobs": _READ, "suffix": Key(only=("",))},
    "responses": {
        **_ALL,
        **_TOOLS,
        "access_programs": _NO_EFFECT,
        "background": Key(only=(False,)),
        "background_options": _NO_EFFECT,
        "context_management": Key(only=([],)),
        "conversation": Key(only=(), why="but the whole conversation as input: this server keeps none"),
        "image": _NO_EFFECT,
        "include": _READ,
        "input": _READ,
        "instructions": _READ,
        "max_output_tokens": _READ,
        "max_tool_calls": _NO_EFFECT,  # limits calls of OpenAI's built-in tools, which this server does not have
        "previous_response_id": Key(only=(), why="but the whole conversation as input: this server keeps none"),
        "prompt": Key(only=(), why="but the text itself as instructions: this server keeps no prompts"),
        "reasoning": Key(only=(), why="but an object", passed_over=lambda value: isinstance(value, dict), note=_HINT.note),
        "stream": _READ,
        "stream_options": _NO_EFFECT,
        "text": Key(
            only=({"format": {"type": "text"}}, {}),
            read=_is_format,
            passed_over=_has_verbosity,
            note=f"of verbosity: {_HINT.note}",
        ),
        "top_logprobs": _READ,
        "truncation": Key(
            only=("disabled",),
            passed_over=lambda value: value == "auto",
            note="a conversation that is too long is refused, and never cut",
        ),
    },
    "messages": {
        "cache_control": _NO_EFFECT,
        "chat_template_kwargs": _READ,
        "container": Key(only=(), why="since this server runs no code"),
        "context_management": Key(only=(), why="but the whole conversation: a conversation that is too long is refused"),
        "diagnostics": _NO_EFFECT,
        "inference_geo": _NO_EFFECT,
        "max_tokens": _READ,
        "mcp_servers": Key(only=([],), why="since this server calls no tools: run them in the client"),
        "messages": _READ,
        "metadata": _NO_EFFECT,
        "model": _READ,
        "output_config": Key(
            only=({},), why="or a format", read=_is_format, passed_over=_has_effort, note=f"but for its format: {_HINT.note}"
        ),
        "record": _READ,
        "service_tier": _NO_EFFECT,
        "speed": _NO_EFFECT,
        "stop_sequences": _READ,
        "stream": _READ,
        "system": _READ,
        "temperature": _READ,
        "thinking": Key(only=(), why="but an object", passed_over=lambda value: isinstance(value, dict), note=_HINT.note),
        "tool_choice": _READ,
        "tools": _READ,
        "top_k": _READ,
        "top_p": _READ,
        "user_profile_id": _NO_EFFECT,
        "workspace_id": _NO_EFFECT,
    },
}
"""Every key of each API's requests. Any other key is refused as unknown."""
IN_CHAT = frozenset(name for name in KEYS["responses"].keys() & KEYS["chat"].keys() if KEYS["chat"][name] is _READ) - {"tools"}
"""Keys of the Responses API that are read in the same way as in a chat."""
INCLUDED = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values that `include` may have. Answers of this server have only the log-probabilities."""


def looked_up(values: Mapping[str, Any], api: Api) -> tuple[list[str], dict[str, str]]:
    """Return the problems of a request's keys that are not null, and a note by key for each value that is ignored."""
    problems: list[str] = []
    notes: dict[str, str] = {}
    for name, value in values.items():
        key = KEYS[api].get(name)
        if key is None:
            problems.append(f"{name:.60}: found a key that this server does not know; leave it out")
        elif key.only is None or any(_same(value, one) for one in key.only) or key.read(value):
            continue
        elif key.passed_over(value):
            notes[name] = f"{name} = {shown(value)} has no effect: {key.note}"
        else:
            allowed = " or ".join(json.dumps(one) for one in key.only) or "none"
            problems.append(f"{name}: found {shown(value)}; expected {allowed}, {key.why}")
    return problems, notes


def shown(value: object) -> str:
    """Return the beginning of a value as JSON."""
    return f"{json.dumps(value, ensure_ascii=False, default=str):.60}"


def _same(value: object, one: object) -> bool:
    """Return whether two values of JSON are the same: true is not 1."""
    return value == one and isinstance(value, bool) == isinstance(one, bool)

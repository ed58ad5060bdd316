"""Requests of OpenAI's API, read strictly: what the server does not do is refused, with everything else that is wrong."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from rlcore.spi import DataError, Message, SamplingParams, capabilities
from rlcore.spi.arrays import Int32Array
from rlcore_serve.sessions.bounds import require_bounded
from rlcore_serve.sessions.errors import RequestError, bad_request
from rlcore_serve.sessions.request_keys import looked_up, names_function, shown
from rlcore_serve.sessions.response_formats import format_fault, json_schema_of
from rlcore_text.chats.images import image_parts
from rlcore_text.chats.messages import read_message, read_messages, read_tools

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
MIN_TEMPERATURE = 1e-3
"""Besides 0; logits that are divided by less are infinite, and say nothing any more."""

_STREAM_OPTIONS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
"""Keys of `stream_options`; the second has no effect, since this server pads nothing."""


@frozen(kw_only=True, eq=False)
class AnswerRequest:
    """A request for `n` answers, of either kind."""

    model: str
    sampling: SamplingParams
    """The client's sampling parameters, over the default."""
    chooses_distribution: bool
    """True where the client chose a distribution other than the default."""
    max_tokens: int | None
    n: int
    seed: int | None
    stream: bool
    include_usage: bool
    """True where a stream ends with the numbers of tokens."""
    logprobs: bool
    top_logprobs: int = 0
    """Most probable tokens to report beside each token."""
    prompt_logprobs: int | None = None
    """Most probable tokens to report beside each token of a completion's prompt; None without log-probabilities of it."""
    return_token_ids: bool = False
    """True where the reply has the tokens of prompt and answers too."""
    record: bool = True
    """True where the session records the answers; those that it does not are no part of its sequences."""
    messages: tuple[Message, ...] = ()
    """Messages of a chat, in the form of `read_messages`."""
    tools: tuple[Mapping[str, Any], ...] = ()
    forced: str | None = None
    """The name of the tool that the answer has to call, "" for any; None where it may call none."""
    template_variables: Mapping[str, Any] = field(factory=dict)
    """Variables of the chat template in this request, which override those of the model."""
    prompt: str | Int32Array | None = None
    """The prompt of a completion: text, or int32 [length]; None in a chat."""
    notes: Mapping[str, str] = field(factory=dict)
    """Notes on keys that the server takes and ignores, by key."""

    def needs(self) -> list[str]:
        """Return the capabilities that a generator needs for the answers."""
        sampling = self.sampling
        needed = {
            capabilities.TOP_P: sampling.top_p < 1.0,
            capabilities.TOP_K: sampling.top_k > 0,
            capabilities.STOP_STRINGS: bool(sampling.stop_strings),
            capabilities.TOKEN_STREAMING: self.top_logprobs > (0 if self.prompt is None else 1),
            capabilities.PROMPT_LOGPROBS: self.prompt_logprobs is not None,
            capabilities.STRUCTURED_OUTPUT: sampling.json_schema is not None,
        }
        return [name for name, is_needed in needed.items() if is_needed]


def read_request(body: object, default: SamplingParams, *, is_chat: bool) -> AnswerRequest:
    """Return what a request's JSON asks for. RequestError with status 400, and all that is wrong, where anything is."""
    if not isinstance(body, dict):
        raise RequestError(400, f"found a {type(body).__name__} as the request's body; expected a JSON object")
    values = {name: value for name, value in body.items() if value is not None}
    require_bounded(values)
    problems, notes = looked_up(values, "chat" if is_chat else "completions")
    problems += _wrong(values, is_chat)
    if problems:
        raise bad_request(problems)
    stop = values.get("stop", ())
    sampling = evolve(
        default,
        temperature=float(values.get("temperature", default.temperature)),
        top_p=float(values.get("top_p", default.top_p)),
        top_k=max(values.get("top_k", default.top_k), 0),
    )
    chooses = sampling != default
    ends = () if values.get("ignore_eos") else default.stop_token_ids
    schema = json_schema_of(values.get("response_format"))
    sampling = evolve(
        sampling,
        json_schema=schema,
        stop_token_ids=tuple(dict.fromkeys((*ends, *values.get("stop_token_ids", ())))),
        # A schema ends its text by itself, which a stop string would cut.
        stop_strings=() if schema is not None else (*default.stop_strings, *((stop,) if isinstance(stop, str) else stop)),
    )
    tools = () if values.get("tool_choice") == "none" else read_tools(values.get("tools"))
    return AnswerRequest(
        model=values["model"],
        sampling=sampling,
        chooses_distribution=chooses,
        max_tokens=values.get("max_completion_tokens", values.get("max_tokens", None if is_chat else 16)),
        n=values.get("n", 1),
        seed=values["seed"] % 2**63 if "seed" in values else None,
        stream=values.get("stream", False),
        include_usage=bool(dict(values.get("stream_options", {})).get("include_usage")),
        logprobs=values.get("logprobs") is not None and values["logprobs"] is not False,
        top_logprobs=values.get("top_logprobs", 0) if is_chat else int(values.get("logprobs", 0)),
        prompt_logprobs=values.get("prompt_logprobs"),
        return_token_ids=values.get("return_token_ids", False),
        record=values.get("record", True),
        messages=tuple(read_messages(values["messages"], keeps_unreadable=True)) if is_chat else (),
        tools=tools,
        forced=_forced(values.get("tool_choice")),
        template_variables=values.get("chat_template_kwargs", {}),
        prompt=None if is_chat else _prompt(values["prompt"]),
        notes=notes,
    )


def read_as_chat(
    chat: Mapping[str, Any], default: SamplingParams, problems: Sequence[str], notes: Mapping[str, str]
) -> AnswerRequest:
    """Return the request that another API's is, put into the form of a chat, with the notes on its own keys. RequestError with
    status 400, and all that is wrong, its own problems first."""
    found = list(problems)
    try:
        request = read_request(chat, default, is_chat=True)
    except RequestError as error:
        found += str(error).splitlines()
    if found:
        raise bad_request(found)
    return evolve(request, notes=notes)


def _forced(choice: Any) -> str | None:
    """Return AnswerRequest.forced of a `tool_choice` in the form of a chat or of the Responses API."""
    if names_function(choice):
        return str(choice.get("function", choice)["name"])
    return "" if choice == "required" else None


def _prompt(prompt: Any) -> str | Int32Array:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, str) else np.asarray(prompt, np.int32)


def _wrong(values: Mapping[str, Any], is_chat: bool) -> Iterator[str]:
    if not isinstance(values.get("model"), str):
        yield f"model: found {shown(values.get('model'))}; expected the model's name"
    for name, low, high in (
        ("n", 1, MAX_N),
        ("max_tokens", 1, None),
        ("max_completion_tokens", 1, None),
        ("top_k", -1, MAX_TOP_K),
    ):
        value = values.get(name, 1)
        if type(value) is not int or value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"between {low} and {high}"
            yield f"{name}: found {shown(value)}; expected a whole number, {limit}"
    for name, low_open, top in (("temperature", False, 2.0), ("top_p", True, 1.0)):
        value = values.get(name, 1.0)
        if type(value) not in (int, float) or not 0 <= value <= top or (low_open and value == 0):
            yield f"{name}: found {shown(value)}; expected a number from 0 to {top:g}"
    if type(values.get("temperature")) is float and 0 < values["temperature"] < MIN_TEMPERATURE:
        yield f"temperature: found {shown(values['temperature'])}; expected 0, or at least {MIN_TEMPERATURE:g}"
    if type(values.get("seed", 0)) is not int:
        yield f"seed: found {shown(values['seed'])}; expected a whole number"
    for name in ("stream", "ignore_eos", "return_token_ids", "record"):
        if type(values.get(name, False)) is not bool:
            yield f"{name}: found {shown(values[name])}; expected true or false"
    if not isinstance(values.get("stop_token_ids", []), list) or not all(map(_is_token, values.get("stop_token_ids", []))):
        yield f"stop_token_ids: found {shown(values['stop_token_ids'])}; expected a list of token ids"
    if not isinstance(values.get("chat_template_kwargs", {}), dict):
        yield f"chat_template_kwargs: found {shown(values['chat_template_kwargs'])}; expected an object"
    options = values.get("stream_options", {})
    if (
        not isinstance(options, dict)
        or options.keys() - _STREAM_OPTIONS
        or not all(one is None or type(one) is bool for one in options.values())
    ):
        expected = f"an object of true and false, with {' and '.join(_STREAM_OPTIONS)}"
        yield f"stream_options: found {shown(options)}; expected {expected}"
    stop = values.get("stop", [])
    if not all(isinstance(one, str) and one for one in (stop if isinstance(stop, list) else [stop])):
        yield f"stop: found {shown(stop)}; expected a text or a list of texts, none of them empty"
    logprobs = values.get("logprobs", False)
    if type(logprobs) is not bool and (is_chat or type(logprobs) is not int or not 0 <= logprobs <= MAX_TOP_LOGPROBS):
        expected = "true or false" if is_chat else f"a whole number from 0 to {MAX_TOP_LOGPROBS}"
        yield f"logprobs: found {shown(logprobs)}; expected {expected}"
    top = values.get("top_logprobs", 0)
    if is_chat and (type(top) is not int or not 0 <= top <= (MAX_TOP_LOGPROBS if logprobs else 0)):
        yield f"top_logprobs: found {shown(top)}; expected a whole number from 0 to {MAX_TOP_LOGPROBS}, with logprobs"
    yield from _wrong_messages(values) if is_chat else _wrong_prompt(values)


def _wrong_messages(values: Mapping[str, Any]) -> Iterator[str]:
    messages, tools = values.get("messages"), values.get("tools", [])
    if not isinstance(messages, list) or not messages:
        yield f"messages: found {shown(messages)}; expected a list of at least one message"
        messages = []
    for number, message in enumerate(messages):
        try:
            read = read_message(message, is_last=number == len(messages) - 1, keeps_unreadable=True)
            if message.get("prefix"):
                yield f"messages[{number}]: found prefix; expected none: an answer of this server is a message of its own"
            if image_parts(read):
                yield f"messages[{number}]: found an image; expected parts of text alone"
        except DataError as error:
            yield f"messages[{number}]: found one {error}"
    yield from _wrong_format(values)
    choice: Any = values.get("tool_choice")
    if names_function(choice):
        name, known = choice.get("function", choice).get("name"), map(tool_name, tools if isinstance(tools, list) else ())
        if not isinstance(name, str) or name not in known:
            yield f"tool_choice: found {shown(choice)}; expected the name of one of the tools"
    elif choice == "required" and not tools:
        yield 'tool_choice: found "required" without tools; expected at least one'
    if not isinstance(tools, list):
        yield f"tools: found {shown(tools)}; expected a list of tools"
        tools = []
    for number, tool in enumerate(tools):
        try:
            read_tools([tool])
        except DataError as error:
            yield f"tools[{number}]: found {error}"


def _wrong_format(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a `response_format`, alone and beside keys that leave its answer no room."""
    response_format = values.get("response_format")
    fault = None if response_format is None else format_fault(response_format)
    if fault is not None:
        yield f"response_format: {fault}"
    elif json_schema_of(response_format) is not None:
        if values.get("tools") and values.get("tool_choice") != "none":
            yield 'response_format: found one beside tools; expected tool_choice "none": a call is no text of the format'
        if values.get("stop"):
            yield f"stop: found {shown(values['stop'])}; expected none beside a response_format, which ends the answer"
        if values.get("ignore_eos"):
            yield "ignore_eos: found true; expected false beside a response_format, whose answer a stop token ends"


def tool_name(tool: object) -> object:
    """Return the name of a tool in the form of a chat or of the Responses API; None where it has none."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _wrong_prompt(values: Mapping[str, Any]) -> Iterator[str]:
    wanted = values.get("prompt_logprobs", 0)
    if type(wanted) is not int or not 0 <= wanted <= MAX_TOP_LOGPROBS:
        yield f"prompt_logprobs: found {shown(wanted)}; expected a whole number from 0 to {MAX_TOP_LOGPROBS}"
    if "prompt_logprobs" in values and values.get("stream") is True:
        yield "prompt_logprobs: found some of a stream; expected none, or stream = false"
    prompt = values.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) or _are_tokens(prompt):
        return
    yield f"prompt: found {shown(prompt)}; expected one text, or a list of token ids"


def _are_tokens(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(map(_is_token, prompt))


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31

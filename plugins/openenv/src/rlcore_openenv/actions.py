"""Actions that an answer of the policy asks for."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from attrs import frozen

from rlcore.reading import parse_json
from rlcore.spi import RewardError
from rlcore_openenv.config import OpenEnvConfig
from rlcore_workers.functions import brief, call, load_function

ACTION_KEY = "environment.openenv.action_function"
ACTION_FORM = 'a function of (answer, observation), as "FILE.py:FUNCTION" or "MODULE:FUNCTION", not async'
_MAX_WORK = 8
"""Multiple of a text's length that is parsed in vain before objects within a broken one are left out."""


@frozen(kw_only=True, eq=False)
class Attempt:
    """An action, or why there is none."""

    action: Mapping[str, Any] | None = None
    fault: str = ""
    """The text for the policy where there is no action."""
    call_id: str | None = None
    """The call of a tool that it is."""


Translate: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[Attempt]]
"""From the assistant's message and the observation before it. No attempt: the policy wants no further step."""


def translator(config: OpenEnvConfig) -> Translate:
    """Return how answers become actions. ConfigError where the function does not load."""
    match config.action:
        case "text":
            return lambda message, _: [Attempt(action={config.action_field: _text(message)})]
        case "json":
            return lambda message, _: [_json_attempt(_text(message))]
        case "tools":
            return lambda message, _: [_call(call) for call in message.get("tool_calls") or ()]
    return _by_function(load_function(config.action_function or "", ACTION_KEY, ACTION_FORM))


def last_object(text: str) -> dict[str, Any] | None:
    """Return the last JSON object in a text, within no other; None where there is none. It takes time in proportion to the
    text's length."""
    found, start, decoder, work = None, text.find("{"), json.JSONDecoder(), 0
    text = _Uncounted(text)
    while start >= 0:
        try:
            found, end = decoder.raw_decode(text, start)
        except RecursionError:
            break
        except ValueError as error:
            failed = getattr(error, "pos", len(text))  # a number of too many digits has no place
            work += failed - start
            end = start + 1 if work < _MAX_WORK * len(text) else max(failed, start + 1)
        start = text.find("{", end)
    return found


class _Uncounted(str):
    """A text whose lines JSONDecodeError does not count, which takes time in proportion to the error's place."""

    __slots__ = ()

    def count(self, *_: Any) -> int:
        """See str."""
        return 0

    def rfind(self, *_: Any) -> int:
        """See str."""
        return 0


def tools_of(observation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of an observation of `list_tools`, as OpenAI's API has them; none where it is no such observation."""
    listed = observation.get("tools")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in (listed if isinstance(listed, list) else ())
        if isinstance(tool, dict) and isinstance(tool.get("name"), str)
    ]


def _text(message: Mapping[str, Any]) -> str:
    return str(message.get("content") or "").strip()


def _json_attempt(text: str) -> Attempt:
    action = last_object(text)
    return Attempt(action=action, fault="The answer has no JSON object in it, which is the action.")


def _call(call: Mapping[str, Any]) -> Attempt:
    function, call_id = call["function"], call.get("id")
    try:
        arguments = parse_json(function.get("arguments") or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        return Attempt(fault="The arguments are no JSON object.", call_id=call_id)
    action = {"type": "call_tool", "tool_name": function["name"], "arguments": arguments}
    return Attempt(action=action, call_id=call_id)


def _by_function(function: Callable[..., Any]) -> Translate:
    def translate(message: Mapping[str, Any], observation: Mapping[str, Any]) -> Sequence[Attempt]:
        said = call(function, ACTION_KEY, _text(message), dict(observation))
        if said is not None and not isinstance(said, Mapping):
            raise RewardError(f"{ACTION_KEY} returned {brief(said)}; expected a mapping, or None where there is no action")
        return [Attempt(action=said, fault="The answer has no action in it.")]

    return translate

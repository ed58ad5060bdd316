"""The format that a request asks of an answer's text."""

import json
from collections.abc import Mapping
from typing import Any

from rlcore.spi import ChatTokenizer, DataError, SamplingParams
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.request_keys import shown

_NAMED = {"name", "description", "schema", "strict"}
"""Keys of a `json_schema`. `strict` has no effect: every answer is held to its schema."""
_MARKS = '{"[:,]"}'
"""Characters that every JSON needs."""
_EXPECTED = 'the type "text", "json_object" or "json_schema" and no unknown keys; the last with an object as its schema'


def json_schema_of(response_format: Mapping[str, Any] | None) -> str | None:
    """Return the JSON Schema of a right `response_format`; None where the text is free."""
    kind = "text" if response_format is None else response_format["type"]
    if kind == "json_object":
        return json.dumps({"type": "object"})
    return json.dumps(response_format["json_schema"]["schema"]) if response_format and kind == "json_schema" else None


def format_fault(response_format: Any) -> str | None:
    """Return what is wrong with a `response_format` in the form of a chat; None where nothing is."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind in ("text", "json_object") and len(response_format) == 1:
        return None
    named = response_format.get("json_schema") if kind == "json_schema" and len(response_format) == 2 else None
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict) or named.keys() - _NAMED:
        return f"found {shown(response_format)}; expected {_EXPECTED}"
    return None


def as_chat(text_format: Any) -> Any:
    """Return the `format` of a `text` or an `output_config`, which names its schema itself, in the form of a chat."""
    if not isinstance(text_format, dict) or text_format.get("type") != "json_schema":
        return text_format
    return {"type": "json_schema", "json_schema": {name: value for name, value in text_format.items() if name != "type"}}


def require_no_thought(sampling: SamplingParams, mark: str) -> None:
    """RequestError where a schema would begin within the thought whose `mark` a prompt ends in."""
    if mark and sampling.json_schema is not None:
        expected = "one without, such as by chat_template_kwargs that turn thoughts off"
        raise RequestError(400, f"response_format: found a prompt that ends in {mark.strip()}; expected {expected}")


def require_schema(sampling: SamplingParams, tokenizer: ChatTokenizer, *, has_masks: bool) -> None:
    """RequestError where no text fulfils the schema of a request, where the model cannot write or end one, and where its answer
    would be trained on as if it had been chosen among all texts. `has_masks`: whether samples say what their tokens were chosen
    among, or nothing trains on them."""
    from rlcore_torchkit.json_schema import guided_schema

    if not has_masks:
        raise RequestError(
            400,
            "response_format: found one in a session that a run trains on; expected none: a schema leaves out tokens, and the "
            "samples of this run do not say which. Set rollout.top_k or rollout.top_p, with which they do, or send "
            '"record": false, which keeps an answer out of training',
        )
    if "".join(tokenizer.decode(tokenizer.encode(_MARKS)).split()) != _MARKS:
        raise RequestError(400, f"response_format: found a model without tokens for JSON; expected some for each of {_MARKS}")
    if not set(tokenizer.stop_token_ids) <= set(sampling.stop_token_ids):
        expected = f"the model's own among them, {list(tokenizer.stop_token_ids)}, which end an answer"
        raise RequestError(400, f"response_format: found the stop tokens {list(sampling.stop_token_ids)}; expected {expected}")
    assert sampling.json_schema is not None
    try:
        guided_schema(sampling.json_schema)
    except DataError as error:
        raise RequestError(400, f"response_format: {error}") from error

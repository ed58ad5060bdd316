"""Limits on the size, depth and number of items of a request. The server checks them before it does anything else."""

import json
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any, NoReturn

from rlcore.schema.file_limits import unique_keys
from rlcore.schema.printable import lone_surrogate
from rlcore_serve.sessions.errors import RequestError, bad_request

MAX_BODY_BYTES = 64 * 2**20
LEAST_BODY_BYTES = 2**20
"""Bytes that a body may always have, however few tokens the model reads."""
BYTES_PER_TOKEN = 64
"""Bytes that a body may have for each token that the model reads. Text has about four."""
MAX_DEPTH = 64
MAX_PARTS = 500_000
"""Most opening brackets and texts in a body: to build millions of lists and keys blocks all other threads."""
MAX_STOP_CHARACTERS = 1000
MAX_ITEMS = 4_000_000
"""Most commas in a body. No model reads a prompt of as many tokens."""
MAX_DIGITS = 400
"""Most digits of a whole number: the time to read one grows with their square."""
_COUNTS = {"messages": 10_000, "input": 10_000, "tools": 1000, "stop": 64, "stop_token_ids": 1000}
"""Most items of each list in a request."""


def max_body_bytes(max_sequence_length: int) -> int:
    """Return the most bytes of a request's body to a model that reads so many tokens."""
    return min(max(BYTES_PER_TOKEN * max_sequence_length, LEAST_BODY_BYTES), MAX_BODY_BYTES)


def body_too_long(found: int | None, limit: int) -> RequestError:
    """Return the error for a body of `found` bytes; None is an unknown number."""
    size = "a body" if found is None else f"a body of {found} bytes"
    return RequestError(
        400,
        f"found {size}; expected at most {limit} bytes, which are more than the model reads of any text",
        code="context_length_exceeded",
    )


def read_json(content: bytes) -> Any:
    """Parse a body as JSON. RequestError where it is none, is nested too deep, or has half a character in a text."""
    num_texts = (content.count(b'"') - content.count(b'\\"')) // 2
    num_parts = content.count(b"[") + content.count(b"{") + num_texts
    for found, most, what in ((num_parts, MAX_PARTS, "brackets and texts"), (content.count(b","), MAX_ITEMS, "commas")):
        if found > most:
            raise RequestError(400, f"found {found} {what} in the request's body; expected at most {most}")
    try:
        body = json.loads(
            content, object_pairs_hook=unique_keys, parse_int=_whole, parse_float=_finite, parse_constant=_refuse_constant
        )
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise RequestError(400, f"the request's body is no JSON that can be read: {error}") from error
    layer, depth = [body], 0
    while layer:  # by layers, since a recursion could exceed Python's limit
        for value in layer:
            if not isinstance(value, str):
                if depth == MAX_DEPTH:
                    raise _too_deep()
            elif half := lone_surrogate(value):
                raise RequestError(400, f"the request's body is no JSON that can be read: it has {half}")
        layer, depth = [inner for value in layer for inner in _inside(value) if isinstance(inner, str | list | dict)], depth + 1
    return body


def require_bounded(values: Mapping[str, Any]) -> None:
    """Refuse, with a RequestError, a request with a list or a stop string that is too long."""
    lengths = [(name, len(values[name]), most, "items") for name, most in _COUNTS.items() if isinstance(values.get(name), list)]
    stop = values.get("stop")
    stops = stop if isinstance(stop, list) else [stop]
    lengths += [("stop", len(one), MAX_STOP_CHARACTERS, "characters in one") for one in stops if isinstance(one, str)]
    problems = [f"{name}: found {found} {what}; expected at most {most}" for name, found, most, what in lengths if found > most]
    if problems:
        raise bad_request(problems)


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"found a number of {len(digits)} digits; expected at most {MAX_DIGITS}")
    return int(digits)


def _finite(digits: str) -> float:
    if not isfinite(number := float(digits)):
        raise ValueError(f"found the number {digits:.20}; expected one that a float can hold")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _too_deep() -> RequestError:
    return RequestError(400, f"found JSON that is nested deeper than {MAX_DEPTH} levels; expected at most {MAX_DEPTH}")

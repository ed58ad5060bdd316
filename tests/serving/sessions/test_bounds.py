"""Requests that are too long, too deep or too many are refused before they are read."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from rlcore.spi import SamplingParams
from rlcore_serve.sessions.bounds import LEAST_BODY_BYTES, MAX_BODY_BYTES, MAX_DEPTH, body_too_long, max_body_bytes, read_json
from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.requests import read_request
from rlcore_serve.sessions.response_requests import read_response_request

USER = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
FLAT = {"type": "function", "name": "f"}


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + "1" + closing * depth).encode()


def test_what_is_within_the_bounds_is_read() -> None:
    assert read_json(b'{"a": [1, "\\u00e9", null]}') == {"a": [1, "é", None]}
    assert read_json(nested(MAX_DEPTH))
    assert read_json(b'{"a": [-3, 1e300, 0.5, %s]}' % (b"1" * 400)) == {"a": [-3, 1e300, 0.5, int("1" * 400)]}
    assert read_json(json.dumps({"content": '"quoted" and [bracketed] ' * 100_000}).encode())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (nested(MAX_DEPTH + 1), "deeper than 64"),
        (nested(MAX_DEPTH + 1, '{"a":', "}"), "deeper than 64"),
        (nested(900), "deeper than 64"),
        (b"[" * 500_000, "deeper than 64"),
        (nested(400_000), "deeper than 64"),
        (b"[" + b"[]," * 500_000 + b"1]", "500001 brackets and texts"),
        (b'{"a": 1' + b', "a": 1' * 500_000 + b"}", "500002 brackets and texts"),
        (b"[" + b'"",' * 500_000 + b"1]", "500001 brackets and texts"),
        (b"{", "no JSON"),
        (b"\xff", "no JSON"),
        (b"", "no JSON"),
        (b"[" + b"1," * 4_000_001 + b"1]", "4000001 commas"),
        (b"1" * 401, "401 digits"),
        (b"[-" + b"1" * 10_000 + b"]", "10001 digits"),
        *((b'{"metadata": {"x": ' + number + b"}}", "no JSON") for number in (b"NaN", b"Infinity", b"-Infinity")),
        *((b'{"seed": ' + number + b"}", "a float can hold") for number in (b"1e999", b"-9e400", b"1" * 500 + b".0")),
        (b'["\\ud800"]', "half a character"),
        (b'{"\\udfff": 1}', "half a character"),
        (b'{"a": {"b": ["\xed\xa0\x80"]}}', "no JSON"),
    ],
)
def test_json_beyond_the_bounds_is_refused(body: bytes, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        read_json(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(("tokens", "expected"), [(10, LEAST_BODY_BYTES), (32_768, 2**21), (10**9, MAX_BODY_BYTES)])
def test_a_body_may_be_as_long_as_what_the_model_reads(tokens: int, expected: int) -> None:
    assert max_body_bytes(tokens) == expected
    error = body_too_long(expected + 1, expected)
    assert error.body()["error"]["code"] == "context_length_exceeded"
    assert str(expected + 1) in str(error)


def chat(**body: Any) -> None:
    read_request({"model": "m", "messages": [USER]} | body, SamplingParams(), is_chat=True)


def completion(**body: Any) -> None:
    read_request({"model": "m", "prompt": "a"} | body, SamplingParams(), is_chat=False)


def response(**body: Any) -> None:
    read_response_request({"model": "m", "input": "a"} | body, SamplingParams())


BOUNDS: list[tuple[tuple[Callable[..., None], ...], str, Any, Any]] = [
    ((chat, completion, response), "stop", ["s"] * 64, ["s"] * 65),
    ((chat, completion, response), "stop", "s" * 1000, "s" * 1001),
    ((chat, completion, response), "stop", ["s" * 1000], ["x", "s" * 1001]),
    ((chat, completion, response), "stop_token_ids", [1] * 1000, [1] * 1001),
    ((chat, completion, response), "seed", 10**30, 1e300),
    ((chat, completion, response), "temperature", 2, 10**30),
    ((chat,), "messages", [USER] * 10_000, [USER] * 10_001),
    ((response,), "input", [USER] * 10_000, [USER] * 10_001),
    ((chat,), "tools", [TOOL] * 1000, [TOOL] * 1001),
    ((response,), "tools", [FLAT] * 1000, [FLAT] * 1001),
    ((chat, completion), "n", 128, 129),
    ((chat, completion), "n", 1, 10**30),
    ((chat, completion, response), "top_k", 2**31 - 1, 10**30),
    ((chat, response), "top_logprobs", 0, 10**30),
    ((completion,), "logprobs", 1, 10**30),
    ((chat, completion), "max_tokens", 10**30, 0),
    ((chat,), "max_completion_tokens", 10**30, -1),
    ((response,), "max_output_tokens", 10**30, 0),
]


@pytest.mark.parametrize(
    ("ask", "name", "most", "beyond"),
    [
        pytest.param(ask, name, most, beyond, id=f"{number}-{name}-{ask.__name__}")
        for number, (asks, name, most, beyond) in enumerate(BOUNDS)
        for ask in asks
    ],
)
def test_lists_and_numbers_are_bounded(ask: Callable[..., None], name: str, most: Any, beyond: Any) -> None:
    ask(**{name: most})
    with pytest.raises(RequestError) as caught:
        ask(**{name: beyond})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{name}: found ")
    assert len(line) < 300


def test_an_error_shows_no_more_than_the_beginning_of_a_value() -> None:
    with pytest.raises(RequestError) as caught:
        chat(metadata={}, tool_choice="x" * 10**6, model=["y" * 10**6])
    assert len(json.dumps(caught.value.body())) < 600


def test_an_error_lists_the_first_of_many_things_that_are_wrong() -> None:
    for ask, name in ((chat, "messages"), (response, "input")):
        with pytest.raises(RequestError) as caught:
            ask(**{name: [{}] * 9000})
        lines = str(caught.value).splitlines()
        assert len(lines) == 51
        assert lines[-1] == "and 8950 more"

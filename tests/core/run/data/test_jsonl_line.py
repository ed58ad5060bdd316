"""Lines of a JSONL file that are rows, and every reason for which others are none."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.run.data import jsonl_rows
from rlcore.run.data.jsonl_rows import parse_line

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
)
LINES = {
    "no object": (b"[1]", "holds a JSON list; expected one JSON object a line"),
    "half an object": (b'{"prompt": "b"', r"is no JSON \(.*one JSON object a line"),
    "no UTF-8": ('{"prompt": "é"}'.encode("latin-1"), "is no JSON"),
    "nothing": (b"", "is no JSON"),
    "surrogate": (
        rb'{"prompt": "a\ud83d"}',
        r"holds half a character \(the surrogate \\ud83d by itself\) in the field 'prompt', at",
    ),
    "surrogate elsewhere": (rb'{"prompt": "a", "meta": [{"x": "\uDE00"}]}', r"in the field 'meta\[0\]\.x', at character 0"),
    "surrogate in a key": (rb'{"prompt": "a", "\udc00": 1}', "half a character"),
    "escaped NUL": (rb'{"prompt": "a\u0000b"}', "holds a NUL character in the field 'prompt', at character 1"),
    "NUL byte": (b'{"prompt": "a\0"}', "holds a NUL byte"),
    "NUL bytes alone": (b"\0" * 16, "holds a NUL byte"),
    "NaN": (b'{"prompt": "a", "answer": NaN}', r"is no JSON \(NaN is no JSON value; write null"),
    "infinity": (b'{"prompt": "a", "answer": -Infinity}', "-Infinity is no JSON value"),
    "deep": (b"[" * 100_000, "is nested too deeply to be read"),
    "long": (b'{"prompt": "' + b"a" * 2000 + b'"}', "has 0 MiB; expected at most 0"),
    "many digits": (b'{"prompt": "a", "answer": ' + b"1" * 5000 + b"}", "is no JSON .*5000 digits"),
}


@settings(max_examples=50)
@given(st.dictionaries(TEXTS, VALUES, max_size=4), st.booleans())
def test_every_object_of_json_is_read_as_it_was_written(row, ascii_only):
    assert parse_line(json.dumps(row, ensure_ascii=ascii_only).encode()) == row


@pytest.mark.parametrize("what", LINES)
def test_a_line_that_is_no_row_has_its_reason(monkeypatch, what):
    line, reason = LINES[what]
    if what == "long":
        monkeypatch.setattr(jsonl_rows, "MAX_LINE_BYTES", 1000)
    with pytest.raises(ValueError, match=reason):
        parse_line(line)


def test_whole_characters_outside_the_basic_plane_are_text():
    assert parse_line(rb'{"prompt": "\ud83d\ude00 \\ud800 \\u0000"}')["prompt"] == "\U0001f600 \\ud800 \\u0000"

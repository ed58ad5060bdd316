"""The rows of a JSONL file, and every way in which one can be bad."""

import tracemalloc

import numpy as np
import pytest
from data_support import rows_of_file

from rlcore.spi import DataError


def test_jsonl_rows_are_those_of_the_file(write_jsonl):
    rows = [{"prompt": "ä+b\u2028=", "answer": i, "extra": [1, {"a": None}]} for i in range(7)]
    loaded = rows_of_file("jsonl", write_jsonl(rows))
    assert list(loaded) == rows
    assert [loaded[-1], loaded[np.int64(2)], *loaded[1:3]] == [rows[6], rows[2], *rows[1:3]]
    with pytest.raises(IndexError):
        loaded[7]


def test_jsonl_skips_blank_lines_and_stops_at_the_limit(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"prompt": "a"}\r\n  \n{"prompt": "b"}\nno json')
    assert [row["prompt"] for row in rows_of_file("jsonl", path, limit=2)] == ["a", "b"]


def test_a_line_that_is_no_row_is_named_with_its_file_and_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "a\0"}\n')
    with pytest.raises(DataError, match=r"data\.train\.path: .*rows\.jsonl, line 3 .* NUL"):
        rows_of_file("jsonl", path)


def test_directory_in_place_of_a_jsonl_file(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        rows_of_file("jsonl", tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "b"', r"line 2 is no JSON \(.*one JSON object a line"),
        ("prompt,b", r"line 2 is no JSON"),
        ("[1]", "line 2 holds a JSON list; expected one JSON object a line"),
        ('{"prompt": 3}', "line 2: the field 'prompt' holds int 3; expected text, or a list of chat messages"),
        ('{"prompt": null}', "line 2: the field 'prompt' holds NoneType None"),
        ('{"prompt": ""}', "line 2: the field 'prompt' holds an empty text"),
        ('{"prompt": []}', "an empty list of messages"),
        ('{"prompt": ["a"]}', "holds message 0 that is str"),
        ('{"prompt": [{"role": "user"}]}', "message 0 whose 'content' is NoneType"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "message 0 whose 'content' is a list"),
        (
            '{"Prompt": "b"}',
            r"lacks the field 'prompt' \(data\.train\.prompt_field\); found the fields 'Prompt'\.",
        ),
        (
            '{"question": "b", "answer": "c"}',
            r'fields \'question\', \'answer\'\. Did you mean .*prompt_field = "question"',
        ),
        ('{"xyz": "b"}', r"Set data\.train\.prompt_field to one of them"),
        ("{}", "found the fields none"),
    ],
)
def test_bad_jsonl_lines_are_named(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(DataError, match=message):
        rows_of_file("jsonl", path)


def test_jsonl_that_is_not_utf8(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match="line 1 is no JSON"):
        rows_of_file("jsonl", tmp_path / "rows.jsonl")


def test_jsonl_rows_take_little_more_memory_than_their_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}", "tags": ["a", "b"]}}\n' for i in range(20_000)))
    tracemalloc.start()
    rows = rows_of_file("jsonl", path)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 20_000
    assert held_bytes < 1.1 * path.stat().st_size + 16 * len(rows) + 100_000

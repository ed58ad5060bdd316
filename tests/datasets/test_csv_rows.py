"""The rows of a CSV file, and every way in which one can be bad."""

import csv

import numpy as np
import pytest
from data_support import rows_of_file
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.run.data.text import row_name
from rlcore.spi import DataError

TEXT = st.text(st.characters(blacklist_characters="\0\r", blacklist_categories=("Cs",)), max_size=6)


@settings(max_examples=40, deadline=None)
@given(fields=st.lists(st.tuples(TEXT.filter(bool), TEXT), min_size=1, max_size=4))
def test_rows_are_those_that_were_written(tmp_path_factory, fields):
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("prompt", "answer"), *fields])
    assert list(rows_of_file("csv", path)) == [{"prompt": prompt, "answer": answer} for prompt, answer in fields]


def test_all_fields_are_text_and_columns_are_renamed(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b'\xef\xbb\xbfquestion,answer\r\n"1+1=\n2+2=",007\r\n\r\n"say ""a""",\r\n')
    rows = rows_of_file("csv", path, prompt_field="question", completion_field="answer")
    assert [row["prompt"] for row in rows] == ["1+1=\n2+2=", 'say "a"']
    assert dict(rows[np.int64(0)])["completion"] == "007"
    assert [row_name(rows, 1), row_name(rows[1:], 0)] == [f"row {n} (the first is 0; line 5 of the file)" for n in (1, 0)]


def test_the_limit_ends_the_reading(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\na,1\nb,2\nc\n")
    assert [row["prompt"] for row in rows_of_file("csv", path, limit=2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\na,1\nb\n", "line 3 has 1 fields; expected 2"),
        (b'prompt\na\n"b\nc\n', r"line 3 is no CSV \(unexpected end"),
        (b'prompt\n"a"b\n', "line 2 is no CSV"),
        (b"prompt\na\n\xe9\n", "line 3: found bytes that are not UTF-8"),
        (b"prompt\n\na\0\n", "line 3 holds a NUL"),
        (b"prompt,answer\na,1\n,2\n", "line 3: the field 'prompt' holds an empty"),
        (b"prompt,a,a\nb,1,2\n", r"line 1: found the names 'a'; expected"),
        (b"question,answer\nb,1\n", r'Did you mean .*prompt_field = "question"'),
        (b"prompt,answer\n", "found no rows"),
        (b"", "found no rows"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"data\.train.*{message}"):
        rows_of_file("csv", path)


def test_directory_in_place_of_a_file(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        rows_of_file("csv", tmp_path)


def test_long_fields_are_read_and_the_limit_of_others_stays(tmp_path):
    path, before = tmp_path / "rows.csv", csv.field_size_limit()
    path.write_text(f"prompt\n{'a' * (before + 1)}\n")
    assert len(rows_of_file("csv", path)[0]["prompt"]) == before + 1
    assert csv.field_size_limit() == before

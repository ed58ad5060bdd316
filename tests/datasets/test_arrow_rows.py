"""The rows of a Parquet file, and every way in which one can be bad."""

from datetime import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_support import rows_of_file

from rlcore.spi import DataError

MESSAGES = [{"role": "user", "content": "1+1="}]


def test_parquet_rows_are_those_of_the_table(tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": i} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=700)
    loaded = rows_of_file("parquet", tmp_path / "rows.parquet")
    assert list(loaded) == rows
    assert [loaded[-1], loaded[np.int64(2999)], *loaded[10:20:4]] == [rows[-1], rows[-1], *rows[10:20:4]]
    assert len(loaded[5:2]) == 0
    assert [row["answer"] for row in rows_of_file("parquet", tmp_path / "rows.parquet", limit=4)] == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        loaded[3000]


MESSAGE, PAIRS = pa.struct({"role": pa.string(), "content": pa.string()}), [[list(MESSAGES[0].items())]]
SHAREGPT = [[{"role": "user", "value": "1+1="}]]


@pytest.mark.parametrize(
    "prompts",
    [
        *(pa.array([MESSAGES], kind) for kind in (pa.list_(MESSAGE), pa.large_list(MESSAGE), pa.list_(MESSAGE, 1))),
        pa.array([MESSAGES], pa.list_view(MESSAGE)),
        pa.array(PAIRS, pa.list_(pa.map_(pa.string(), pa.string()))),
        pa.array(SHAREGPT),
    ],
    ids=lambda prompts: str(prompts.type),
)
def test_parquet_with_chat_messages(tmp_path, prompts):
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "rows.parquet")
    assert rows_of_file("parquet", tmp_path / "rows.parquet")[0]["prompt"] == MESSAGES


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_with_texts(tmp_path, kind):
    pq.write_table(pa.table({"prompt": pa.array(["a"], kind)}), tmp_path / "rows.parquet")
    assert list(rows_of_file("parquet", tmp_path / "rows.parquet")) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": ["a"]}, r"lacks the field 'prompt'.*Did you mean data\.train\.prompt_field = \"promt\""),
        ({"prompt": [1, 2]}, "holds int64; expected text, or lists of chat messages"),
        ({"prompt": [["a"]]}, "holds list<.*string>; expected text"),
        ({"prompt": ["a", None, "b", None]}, "row 1 of .* has no 'prompt': it is null there and in 1 other rows"),
    ],
)
def test_bad_parquet_columns_are_named(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=message):
        rows_of_file("parquet", tmp_path / "rows.parquet")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bad", [0, 4, 6])
def test_a_parquet_row_that_is_not_utf8_is_named(tmp_path, nested, bad):
    content = b"".join(b"\xff\xfe" if row == bad else b"ab" for row in range(7))
    offsets = pa.array(range(0, 16, 2), pa.int32()).buffers()[1]
    texts = pa.StringArray.from_buffers(7, offsets, pa.py_buffer(content))
    messages = pa.StructArray.from_arrays([texts, texts], ["role", "content"])
    prompts = pa.ListArray.from_arrays(pa.array(range(8), pa.int32()), messages) if nested else texts
    pq.write_table(pa.table({"answer": list(range(7)), "prompt": prompts}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=rf"rows\.parquet, row {bad} \(.*'prompt'"):
        rows_of_file("parquet", tmp_path / "rows.parquet")
    if bad:
        assert len(rows_of_file("parquet", tmp_path / "rows.parquet", limit=bad)) == bad


def test_a_parquet_time_beyond_its_day_is_no_damage(tmp_path):
    times = pa.array([-5, 90_000], pa.int32()).view(pa.time32("s"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "at": times}), tmp_path / "rows.parquet")
    assert [row["at"] for row in rows_of_file("parquet", tmp_path / "rows.parquet")] == [time(23, 59, 55), time(1)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_folder_has_the_columns_and_fields_of_all_files(tmp_path, order):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    rows = [
        {"messages": [{"role": "user", "content": "2+2?"}]},
        {"messages": [{"role": "assistant", "content": "I add.", "tool_calls": [call]}], "answer": 4},
    ]
    for number, row in enumerate(order):
        pq.write_table(pa.Table.from_pylist([rows[row]]), tmp_path / f"{number}.parquet")
    loaded = [*rows_of_file("parquet", tmp_path, prompt_field="messages")]
    assert [loaded[place]["messages"] for place in order] == [row["messages"] for row in rows]
    assert loaded[order.index(1)]["answer"] == 4


def test_parquet_that_is_none(tmp_path):
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"data\.train\.path: .*Parquet"):
        rows_of_file("parquet", tmp_path / "rows.parquet")


def test_folders_whose_names_hold_values_are_columns(tmp_path):
    for lang, rows in (("de", {"a": ["x"]}), ("fr", {"a": pa.array(["y"]).dictionary_encode()})):
        (tmp_path / f"lang={lang}").mkdir()
        pq.write_table(pa.table(rows), tmp_path / f"lang={lang}" / "0.parquet")
    rows = rows_of_file("parquet", tmp_path, prompt_field="a")
    assert [(row["a"], row["lang"]) for row in rows] == [("x", "de"), ("y", "fr")]

"""A table gives back what was written into it: the nulls that fill structs are left out, and all others stay."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_support import rows_of_file

from rlcore.spi import DataError
from rlcore_text.rows.arrow_nulls import cleaner

SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
OTHER = {
    "type": "object",
    "properties": {"b": {"type": "string", "enum": ["x"]}, "c": {"type": "object", "properties": {"d": {"type": "x"}}}},
}


def calls(**arguments):
    return [{"role": "assistant", "content": "c", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    "values",
    [
        [{"a": 1}, {"b": {"c": 2, "d": [3]}}, {"b": {"e": [{"f": 1}, {"g": 2}]}}, {}],
        [[{"input": "1", "output": "2"}, {"call": "f", "arguments": [1], "result": 2}], []],
        [[{"name": "f", "parameters": SCHEMA}], [{"name": "g", "parameters": OTHER}]],
        [calls(a=2), calls(b={"c": 1}), calls()],
        [[1, None, 3], [None]],
        [None, {"a": 1}],
        [[{"a": None, "b": 1}]],
    ],
)
def test_a_column_is_what_it_was_before_it_was_written(tmp_path, values):
    rows = [{"prompt": "q", "column": value} for value in values]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = rows_of_file("parquet", tmp_path / "rows.parquet")
    expected = [[{"b": 1}]] if values == [[{"a": None, "b": 1}]] else values  # a null that was meant is one that fills
    assert [row["column"] for row in found] == expected
    assert [found[number]["column"] for number in range(len(values))] == expected


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        (pa.map_(pa.string(), pa.int64()), {"a": None, "b": 1}, {"a": None, "b": 1}),
        (pa.map_(pa.int64(), pa.int64()), [(1, 2)], [(1, 2)]),
        (pa.map_(pa.string(), pa.struct([("a", pa.int64()), ("b", pa.int64())])), {"x": {"a": 1}}, {"x": {"a": 1}}),
        (pa.large_list(pa.struct([("a", pa.int64()), ("b", pa.int64())])), [{"a": 1}, None], [{"a": 1}, None]),
        (pa.list_(pa.struct([("a", pa.int64()), ("b", pa.int64())]), 1), [{"b": 1}], [{"b": 1}]),
        (pa.struct([("a", pa.dictionary(pa.int8(), pa.string())), ("b", pa.int64())]), {"a": "x"}, {"a": "x"}),
    ],
)
def test_the_schema_says_which_nulls_fill(kind, written, read):
    table = pa.table({"column": pa.array([written], kind)})
    assert cleaner(table.schema)(table.to_pylist()[0]) == {"column": read}


def test_columns_of_json_keep_the_nulls_that_they_have(tmp_path):
    value = {"a": None, "b": [{"c": None}]}
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(value)]))
    table = pa.table({"prompt": ["q"], "column": column, "nested": pa.StructArray.from_arrays([column], ["x"])})
    pq.write_table(table, tmp_path / "rows.parquet")
    (row,) = rows_of_file("parquet", tmp_path / "rows.parquet")
    assert row == {"prompt": "q", "column": value, "nested": {"x": value}}


@pytest.mark.parametrize("text", ["no JSON", "", "{", "[" * 100_000])
def test_a_column_of_json_with_another_text_names_the_row(tmp_path, text):
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1", text]))
    pq.write_table(pa.table({"prompt": ["q", "r"], "column": column}), tmp_path / "rows.parquet")
    rows = rows_of_file("parquet", tmp_path / "rows.parquet")
    for take in (lambda: list(rows), lambda: rows[1]):
        with pytest.raises(DataError, match=r"data\.train: row 1 .*JSON"):
            take()


def test_arrays_of_objects_are_lists_of_structs():
    schema = pa.schema([("deep", pa.list_(pa.struct([("p", pa.int64()), ("q", pa.int64())])))])
    row = {"deep": np.array([{"p": 1, "q": None}, {"p": None, "q": 2}], dtype=object)}
    assert cleaner(schema)(row) == {"deep": [{"p": 1}, {"q": 2}]}


@pytest.mark.parametrize("decoded", [{"a": None}, "a text", "5", [None], None])
def test_what_a_data_set_has_decoded_stays(decoded):
    row = {"image": object(), "j": decoded, "other": None}
    schema = pa.schema([("image", pa.struct([("bytes", pa.binary())])), ("j", pa.json_())])
    assert cleaner(schema, is_decoded=True)(row) == row

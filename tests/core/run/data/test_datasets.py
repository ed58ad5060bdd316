"""Rows from every source, and every way in which a data set can be bad."""

import builtins
import json
import sys
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.config.recipe import DatasetConfig
from rlcore.registry.plugin_errors import owner_of
from rlcore.run.data.datasets import load_rows
from rlcore.spi import ContractError, DataError

MESSAGES = [{"role": "user", "content": "1+1="}]


class RowEnvironment:
    """Brings rows for training alone."""

    def rows(self, split):
        return [{"prompt": f"{i}"} for i in range(5)] if split == "train" else None


def jsonl(path, **options):
    return load_rows(DatasetConfig(source="jsonl", path=str(path), **options), "train", None)


def parquet(path, **options):
    return load_rows(DatasetConfig(source="parquet", path=str(path), **options), "train", None)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def test_environment_rows_are_limited_and_missing_ones_named():
    environment = RowEnvironment()
    assert len(load_rows(DatasetConfig(), "train", environment)) == 5
    assert len(load_rows(DatasetConfig(limit=2), "train", environment)) == 2
    with pytest.raises(DataError, match=r"data\.evaluation\.source.*brings no 'evaluation' rows.*data\.evaluation\.path"):
        load_rows(DatasetConfig(), "evaluation", environment)
    with pytest.raises(DataError, match="names no environment"):
        load_rows(DatasetConfig(), "train", None)


def test_rows_that_are_none_and_what_raises_name_the_function():
    class Generating:
        def rows(self, split):
            return iter([{"prompt": "a"}])

    class Raising:
        def rows(self, split):
            raise KeyError(split)

    class Listing:
        def rows(self, split):
            return ["1+1="]

    name = "environment 'acme'"
    with pytest.raises(
        ContractError, match=rf"^{name}: rows\('train'\) returned a list_iterator; expected a sequence of records"
    ):
        load_rows(DatasetConfig(), "train", Generating(), name)
    with pytest.raises(ContractError, match=rf"^{name}: rows\('train'\) returned rows of str; expected a sequence of records"):
        load_rows(DatasetConfig(), "train", Listing(), name)
    with pytest.raises(KeyError) as raised:
        load_rows(DatasetConfig(), "train", Raising(), name)
    assert raised.value.__notes__ == [f"raised in rows('train') of {name}"]
    assert owner_of(raised.value) == name


def test_jsonl_rows_are_those_of_the_file(write_jsonl):
    rows = [{"prompt": "ä+b\u2028=", "answer": i, "extra": [1, {"a": None}]} for i in range(7)]
    loaded = jsonl(write_jsonl(rows))
    assert list(loaded) == rows
    assert [loaded[-1], loaded[np.int64(2)], *loaded[1:3]] == [rows[6], rows[2], *rows[1:3]]
    with pytest.raises(IndexError):
        loaded[7]


def test_jsonl_skips_blank_lines_and_stops_at_the_limit(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"prompt": "a"}\r\n  \n{"prompt": "b"}\nno json')
    assert [row["prompt"] for row in jsonl(path, limit=2)] == ["a", "b"]


def test_a_line_that_is_no_row_is_named_with_its_file_and_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "a\0"}\n')
    with pytest.raises(DataError, match=r"data\.train\.path: .*rows\.jsonl, line 3 holds a NUL byte"):
        jsonl(path)


def test_fields_are_renamed(write_jsonl, tmp_path):
    rows = [{"question": "1+1=", "prompt": "other", "solution": "2"}]
    options = {"prompt_field": "question", "completion_field": "solution"}
    expected = {"question": "1+1=", "solution": "2", "prompt": "1+1=", "completion": "2"}
    assert dict(jsonl(write_jsonl(rows), **options)[0]) == expected
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert dict(parquet(tmp_path / "rows.parquet", **options)[0]) == expected


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_missing_file(tmp_path, source):
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    config = DatasetConfig(source=source, path=str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match=r"data\.train\.path: found no file .*trian\.jsonl.*Did you mean .*train\.jsonl\?"):
        load_rows(config, "train", None)
    with pytest.raises(DataError, match=r"data\.train\.path: found nothing"):
        load_rows(DatasetConfig(source=source), "train", None)


def test_directory_in_place_of_a_jsonl_file(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        jsonl(tmp_path)


def test_empty_files(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"data\.train: found no rows in .*rows\.jsonl"):
        jsonl(tmp_path / "rows.jsonl")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"found no rows in .*rows\.parquet"):
        parquet(tmp_path / "rows.parquet")


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
        ('{"prompt": ["a"]}', "holds str as message 0"),
        ('{"prompt": [{"role": "user"}]}', "message 0 whose 'content' is NoneType"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "message 0 whose 'content' is list"),
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
        jsonl(path)


def test_jsonl_that_is_not_utf8(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match="line 1 is no JSON"):
        jsonl(tmp_path / "rows.jsonl")


def test_parquet_rows_are_those_of_the_table(tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": i} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=700)
    loaded = parquet(tmp_path / "rows.parquet")
    assert list(loaded) == rows
    assert [loaded[-1], loaded[np.int64(2999)], *loaded[10:20:4]] == [rows[-1], rows[-1], *rows[10:20:4]]
    assert len(loaded[5:2]) == 0
    assert [row["answer"] for row in parquet(tmp_path / "rows.parquet", limit=4)] == [0, 1, 2, 3]
    with pytest.raises(IndexError):
        loaded[3000]


def test_parquet_with_chat_messages(tmp_path):
    pq.write_table(pa.table({"prompt": [MESSAGES, MESSAGES]}), tmp_path / "rows.parquet")
    assert parquet(tmp_path / "rows.parquet")[1]["prompt"] == MESSAGES


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
        parquet(tmp_path / "rows.parquet")


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
        parquet(tmp_path / "rows.parquet")
    if bad:
        assert len(parquet(tmp_path / "rows.parquet", limit=bad)) == bad


def test_parquet_that_is_none(tmp_path):
    (tmp_path / "rows.parquet").write_text("no parquet")
    with pytest.raises(DataError, match=r"data\.train\.path: .* does not read as Parquet"):
        parquet(tmp_path / "rows.parquet")


@pytest.mark.usefixtures("hub_cache")
def test_huggingface_directory(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"question": f"{i}+1=", "answer": i} for i in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "test.jsonl").write_text(json.dumps({"question": "9+9=", "answer": 18}) + "\n")
    config = DatasetConfig(source="huggingface", path=str(folder), prompt_field="question", limit=3)
    loaded = load_rows(config, "train", None)
    assert [dict(row) for row in loaded] == [{**row, "prompt": row["question"]} for row in rows[:3]]
    held_out = DatasetConfig(source="huggingface", path=str(folder), prompt_field="question", split="test")
    assert load_rows(held_out, "evaluation", None)[0]["prompt"] == "9+9="
    unknown = DatasetConfig(source="huggingface", path=str(folder), prompt_field="question", split="dev")
    with pytest.raises(DataError, match=r"data\.evaluation\.path: the data set .*\(split 'dev'\) does not load: ValueError"):
        load_rows(unknown, "evaluation", None)


@pytest.mark.usefixtures("hub_cache")
def test_huggingface_name_that_is_none(tmp_path):
    config = DatasetConfig(source="huggingface", path=str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"data\.train\.path: the data set .*nothing.* does not load"):
        load_rows(config, "train", None)
    with pytest.raises(DataError, match=r"data\.train\.path: found nothing"):
        load_rows(DatasetConfig(source="huggingface"), "train", None)


def test_huggingface_without_its_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    real_import = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(DataError, match=r"data\.train\.source.*pip install 'rlcore\[datasets\]'"):
        load_rows(DatasetConfig(source="huggingface", path="any/name"), "train", None)


def test_jsonl_rows_take_little_more_memory_than_their_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}", "tags": ["a", "b"]}}\n' for i in range(20_000)))
    tracemalloc.start()
    rows = jsonl(path)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == 20_000
    assert held_bytes < 1.1 * path.stat().st_size + 16 * len(rows) + 100_000

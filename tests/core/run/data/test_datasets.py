"""Rows from every source, and every way in which a data set can be bad."""

import builtins
import json
import sys
import time
from types import SimpleNamespace

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import frozen

from rlcore.config.data import DatasetConfig
from rlcore.registry.plugin_errors import owner_of
from rlcore.run.data.datasets import load_rows
from rlcore.spi import ContractError, DataError, PluginError

from .conftest import rows_of_file


class RowEnvironment:
    """Brings rows for training alone."""

    def rows(self, split):
        return [{"prompt": f"{i}"} for i in range(5)] if split == "train" else None


class LateRows(RowEnvironment):
    """Brings itself as rows."""

    def rows(self, split):
        return self

    def __getitem__(self, number):
        return {}

    def __len__(self):
        return 1


@pytest.mark.parametrize("function", ["rows", "__len__", "__getitem__"])
def test_late_rows_of_an_environment_are_named(monkeypatch, function):
    monkeypatch.setattr("rlcore.time_limit.load_seconds", lambda: 0.005)
    monkeypatch.setattr(LateRows, function, lambda *_: time.sleep(60))
    with pytest.raises(PluginError, match=r"rows\('train'\) .* 0\.05 s"):
        load_rows(DatasetConfig(), "train", LateRows())


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


def test_a_sequence_may_have_keys_of_its_own():
    class Keyed(list):
        def keys(self):
            return ["prompt"]

    class Numbered:
        keys = ("first",)

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return [row][index]

    row = {"prompt": "1+1="}
    for rows in (Keyed([row]), Numbered()):
        environment = SimpleNamespace(rows=lambda split, rows=rows: rows)
        assert load_rows(DatasetConfig(), "train", environment, "environment x")[0] == row


def test_rows_that_are_none_and_what_raises_name_the_function():
    class Generating:
        def rows(self, split):
            return iter([{"prompt": "a"}])

    class Raising:
        def rows(self, split):
            raise KeyError(split)

    @frozen
    class Columns:
        table: object

        def rows(self, split):
            return self.table

    class Listing:
        def rows(self, split):
            return ["1+1="]

    name = "environment 'acme'"
    with pytest.raises(ContractError, match=rf"^{name}: rows\('train'\) returned a list_iterator"):
        load_rows(DatasetConfig(), "train", Generating(), name)
    with pytest.raises(ContractError, match=rf"^{name}: rows\('train'\) .* str"):
        load_rows(DatasetConfig(), "train", Listing(), name)
    for table in ({"prompt": ["1+1="]}, pandas.DataFrame({"prompt": ["1+1="]})):
        with pytest.raises(ContractError, match=rf"^{name}: rows\('train'\) returned a {type(table).__name__}"):
            load_rows(DatasetConfig(), "train", Columns(table), name)
    with pytest.raises(KeyError) as raised:
        load_rows(DatasetConfig(), "train", Raising(), name)
    assert raised.value.__notes__ == [f"raised in rows('train') of {name}"]
    assert owner_of(raised.value) == name


def test_fields_are_renamed(write_jsonl, tmp_path):
    rows = [{"question": "1+1=", "prompt": "other", "solution": "2"}]
    options = {"prompt_field": "question", "completion_field": "solution"}
    expected = {"question": "1+1=", "solution": "2", "prompt": "1+1=", "completion": "2"}
    assert dict(rows_of_file("jsonl", write_jsonl(rows), **options)[0]) == expected
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert dict(rows_of_file("parquet", tmp_path / "rows.parquet", **options)[0]) == expected


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_missing_file(tmp_path, source):
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    config = DatasetConfig(source=source, path=str(tmp_path / "trian.jsonl"))
    with pytest.raises(DataError, match=r"data\.train\.path: .*trian\.jsonl.*train\.jsonl\?"):
        load_rows(config, "train", None)
    with pytest.raises(DataError, match=r"data\.train\.path: found nothing"):
        load_rows(DatasetConfig(source=source), "train", None)


def test_empty_files(tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"data\.train: .*rows\.jsonl"):
        rows_of_file("jsonl", tmp_path / "rows.jsonl")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"found no rows .*rows\.parquet"):
        rows_of_file("parquet", tmp_path / "rows.parquet")


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
    with pytest.raises(DataError, match=r"data\.evaluation\.path: .*\(split 'dev'\) .* ValueError"):
        load_rows(unknown, "evaluation", None)


@pytest.mark.usefixtures("hub_cache")
def test_huggingface_name_that_is_none(tmp_path):
    config = DatasetConfig(source="huggingface", path=str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"data\.train\.path: .*nothing.* load"):
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

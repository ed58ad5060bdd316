"""Rows from every source, and every way in which a data set can be bad."""

import sys
import time
from types import SimpleNamespace

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from attrs import frozen
from data_support import rows_of_file

from rlcore.config.data import DatasetConfig
from rlcore.registry.plugin_errors import owner_of
from rlcore.run.data.text import row_name
from rlcore.spi import ContractError, DataError, DataSourceProvider, PluginError, installed_data_sources
from rlcore_text.rows.datasets import load_rows
from rlcore_text.rows.given_rows import given_rows


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


class LateSource(list):
    def __iter__(self):
        time.sleep(60)

    def __getitem__(self, number):
        time.sleep(60)


def test_late_rows_of_a_source_are_named(monkeypatch):
    monkeypatch.setattr("rlcore.time_limit.load_seconds", lambda: 0.005)
    late = {"read": lambda request: time.sleep(60), "take": lambda request: LateSource([{"prompt": "a"}])}
    for name, read in late.items():
        monkeypatch.setattr(sys.modules[__name__], name, read, raising=False)
        source(monkeypatch, name)
        with pytest.raises(PluginError, match=r"squares, by .* 'db', .* 0\.3 s"):
            load_rows(DatasetConfig(source="db", path="squares"), "train", None)
    with pytest.raises(PluginError, match=r"data\.train .* 0\.05 s"):
        given_rows(LateSource([{}]), DatasetConfig(source="python"), "data.train")


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


class Squares:
    """Rows of another package, which knows its lines."""

    def __len__(self):
        return 4

    def __getitem__(self, number):
        return {"question": f"{number}*{number}="}

    def line(self, number):
        return 10 + number


def squares(request):
    assert (request.path, request.key, request.split, request.prompt_field) == ("db:squares", "data.train", "odd", "question")
    return Squares()


def source(monkeypatch, read, **changes):
    """Install a data source whose function is in this module."""
    provider = DataSourceProvider(**{"name": "db", "spi": (2, 0), "path": "name", "read": f"{__name__}:{read}", **changes})
    monkeypatch.setitem(installed_data_sources(), "db", provider)


def test_rows_of_another_packages_source(monkeypatch):
    source(monkeypatch, "squares", keys={"split"})
    config = DatasetConfig(source="db", path="db:squares", split="odd", prompt_field="question", limit=3)
    rows = load_rows(config, "train", None)
    expected = [{"question": f"{number}*{number}=", "prompt": f"{number}*{number}="} for number in range(3)]
    assert [dict(row) for row in rows] == [dict(rows[number]) for number in range(3)] == expected
    assert [dict(row) for row in rows[1:]] == expected[1:]
    assert row_name(rows, 1) == "row 1 (the first is 0; line 11 of the file)"
    assert row_name(rows[1:], 0) == "row 0 (the first is 0; line 11 of the file)"


@pytest.mark.parametrize(
    ("read", "error", "expected"),
    [
        (lambda request: iter([{"prompt": "a"}]), ContractError, "'db' returned a list_iterator; expected a sequence of rows"),
        (lambda request: ["a"], ContractError, "'db' returned rows of str; expected mappings of fields"),
        (lambda request: [], DataError, "found no rows in name"),
        (lambda request: [{"text": "a"}], DataError, "name lacks the field 'prompt'"),
        (lambda request: [{"prompt": 3}], DataError, "row 0 .*the field 'prompt' holds"),
        (lambda request: 1 / 0, ZeroDivisionError, "zero"),
    ],
    ids=["iterator", "texts", "none", "no prompt", "no text", "raises"],
)
def test_what_a_source_must_not_return(monkeypatch, read, error, expected):
    monkeypatch.setattr(sys.modules[__name__], "faulty", read, raising=False)
    source(monkeypatch, "faulty")
    with pytest.raises(error, match=expected) as raised:
        list(load_rows(DatasetConfig(source="db", path="name"), "train", None))
    if error is ZeroDivisionError:
        assert owner_of(raised.value) == "the data source 'db'"

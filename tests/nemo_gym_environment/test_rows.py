"""Rows of NeMo Gym's files are read strictly."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import DataError
from rlcore_nemo_gym.rows import agent_of, params_of, read_rows

ROW = {"responses_create_params": {"input": "hi"}, "expected": [1]}


def test_files_come_one_after_another(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps(ROW) + "\n\n" + json.dumps(ROW | {"expected": "\u2028"}, ensure_ascii=False))
    second.write_text(json.dumps(ROW | {"expected": 3}) + "\r\n")
    rows = read_rows((str(first), str(second)), "key")
    assert [row["expected"] for row in rows] == [[1], "\u2028", 3]
    assert [row["expected"] for row in rows[1:]] == ["\u2028", 3]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "no JSON"),
        ("[1]", "JSON list"),
        ('{"prompt": "a"}', "'prompt'.*responses_create_params"),
        ('{"responses_create_params": []}', "'responses_create_params'"),
        ('{"responses_create_params": {"input": "a", "metadata": "b"}}', "metadata 'b'"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n{line}\n")
    with pytest.raises(DataError, match=f"^key: {file}, line 2.*{said}"):
        read_rows((str(file),), "key")


def test_files_without_rows_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(DataError, match="key: found .*empty"):
        read_rows((str(tmp_path / "empty"),), "key")
    with pytest.raises(DataError, match="key: cannot read .*nowhere"):
        read_rows((str(tmp_path / "nowhere"),), "key")


@pytest.mark.parametrize("row", [{}, {"responses_create_params": None}, {"responses_create_params": "a"}])
def test_a_row_asks_something(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="responses_create_params"):
        params_of(row)
    assert params_of(ROW) == {"input": "hi"}


@pytest.mark.parametrize("params", [{"input": []}, {"input": "", "tools": []}, {}])
def test_an_agent_may_fill_in_the_input(tmp_path: Path, params: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"responses_create_params": params}))
    (row,) = read_rows((str(tmp_path / "rows.jsonl"),), "key")
    assert params_of(row) == params


@pytest.mark.parametrize("reference", [None, "a", {}, {"name": None}, {"name": 3}])
def test_a_row_may_name_its_agent(reference: Any) -> None:
    assert agent_of({"agent_ref": reference}) is None
    assert agent_of({"agent_ref": {"type": "any", "name": "a"}}) == "a"


def test_no_file_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl: a named pipe"):
        read_rows([str(tmp_path / "rows.jsonl")], "key")

"""Rows that a program hands over: sequences of mappings, data sets, and what is neither."""

import json
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest

from rlcore.config.data import DatasetConfig
from rlcore.spi import DataError
from rlcore_text.rows.given_rows import given_rows

ROWS = [{"question": "1+1=", "solution": "2", "n": 1}, {"question": "1+2=", "solution": "3", "n": 2}]
CONFIG = DatasetConfig(source="python", prompt_field="question", completion_field="solution")


class Columns:
    """A data set whose slices are columns, as those of the package `datasets` are."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: Any) -> Any:
        return ROWS[index] if isinstance(index, int) else {"n": [row["n"] for row in ROWS[index]]}


class Decoded(Columns):
    """A data set that decodes its columns of JSON itself."""

    features = SimpleNamespace(arrow_schema=pa.schema([("question", pa.json_()), ("solution", pa.json_())]))


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), Columns(), Decoded()])
def test_rows_carry_their_prompt_and_completion(rows: Any) -> None:
    made = given_rows(rows, CONFIG, "data.train")
    assert [(row["prompt"], row["completion"], row["n"]) for row in made] == [("1+1=", "2", 1), ("1+2=", "3", 2)]
    assert "prompt" not in ROWS[0]
    limited = given_rows(rows, DatasetConfig(source="python", prompt_field="question", limit=1), "data.train")
    assert [row["n"] for row in limited[:5]] == [1]


@pytest.mark.parametrize("null", [float("nan"), np.float32("nan"), np.datetime64("NaT"), pandas.NaT, pandas.NA, None])
def test_nulls_of_pandas_are_nulls(null: Any) -> None:
    config = DatasetConfig(source="python")
    row = {"prompt": "1+1=", "completion": "2", "tools": null, "system": null, "level": null}
    (made,) = given_rows([row], config, "data.train", may_be_chats=True)
    assert (made["tools"], made["system"], made["level"]) == (None, None, None)
    with pytest.raises(DataError, match="row 0 .* has null as 'answer'"):
        given_rows([{**row, "answer": null}], DatasetConfig(source="python", completion_field="answer"), "k", may_be_chats=True)


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (None, r"data\.train\.source.*rlcore\.train"),
        (iter(ROWS), "list_iterator"),
        ([], "no rows"),
        ([*ROWS, "3+3="], "row 2 .* str"),
        ([*ROWS, {"problem": "3+3="}], "row 2 .*'question'"),
        ([{"question": 7}], "row 0 .*'question' holds int 7"),
        (pandas.DataFrame(ROWS), "row 0 .*DataFrame.*KeyError"),
    ],
)
def test_what_is_no_row_is_named(rows: Any, names: str) -> None:
    with pytest.raises(DataError, match=names):
        given_rows(rows, CONFIG, "data.train")


def test_pairs_need_no_prompt() -> None:
    config = DatasetConfig(source="python")
    made = given_rows([{"chosen": "a", "rejected": "b"}], config, "data.train", has_prompts=False)
    assert list(made) == [{"chosen": "a", "rejected": "b"}]


CALL = {"function": {"name": "f", "arguments": {"a": 1, "list": [1]}}}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [CALL], "weight": 1}]


def as_arrays(value: Any) -> Any:
    """The value as pandas has it: each list is an array of objects, each number one of numpy's."""
    if isinstance(value, list):
        array = np.empty(len(value), object)
        array[:] = [as_arrays(item) for item in value]
        return array
    if isinstance(value, dict):
        return {name: as_arrays(item) for name, item in value.items()}
    return np.int64(value) if isinstance(value, int) else value


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"messages": CHAT, "tools": [TOOL], "images": []}, {"may_be_chats": True}),
        ({"prompt": CHAT[:1], "completion": CHAT[1:], "tools": []}, {"may_be_chats": True}),
        ({"prompt": CHAT[:1], "tools": [TOOL], "answer": 4}, {}),
        ({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [CHAT[1] | {"content": "b"}]}, {"has_prompts": False}),
    ],
)
def test_arrays_of_messages_and_tools_are_lists(row: dict[str, Any], form: dict[str, Any]) -> None:
    config = DatasetConfig(source="python")
    found, expected = (list(given_rows([one], config, "data.train", **form)) for one in (as_arrays(row), row))
    assert repr(found) == repr(expected).replace("'answer': 4", "'answer': np.int64(4)")


def test_filler_nulls_go_out_of_arrays_too() -> None:
    schema = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("n", pa.int8())])))])

    class Arrays(list[Any]):
        features = SimpleNamespace(arrow_schema=schema)

    rows = Arrays([as_arrays({"messages": [message | {"n": None} for message in CHAT]})])
    (row,) = given_rows(rows, DatasetConfig(source="python"), "data.train", may_be_chats=True)
    assert row["messages"] == CHAT


@pytest.mark.parametrize(("kind", "number"), [("numpy", 1), ("custom", 1.0), (None, 1.0)])
def test_what_is_learned_is_read_without_a_format_but_with_a_transform(kind: str | None, number: float) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "a", "tool_calls": [CALL]}]

    class Formatted(list[Any]):
        """A data set with a format, as those of the package `datasets`, whose numbers beside nulls are floats."""

        format = MappingProxyType({"type": kind})

        def with_format(self, kind: None) -> list[Any]:
            return [{"messages": chat, "image": None, "answer": 4, "others": 5}]

    formatted = json.loads(json.dumps(chat).replace('"a": 1', '"a": 1.0'))
    rows = Formatted([{"messages": formatted, "answer": np.int64(4)}])
    (row,) = given_rows(rows, DatasetConfig(source="python"), "data.train", may_be_chats=True)
    assert repr(row["messages"]) == repr(chat).replace("'a': 1", f"'a': {number}")
    assert row.keys() == {"messages", "answer"}
    assert isinstance(row["answer"], np.int64)


@pytest.mark.parametrize("form", [{"may_be_chats": True}, {}], ids=["chats", "prompts"])
def test_values_that_are_nested_too_deeply_are_named(form: dict[str, Any]) -> None:
    deep: Any = None
    for _ in range(5000):  # beyond any limit of recursion that a library sets
        deep = {"a": deep}
    rows = [
        {
            "prompt": "p",
            "completion": "c",
            "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": deep}}]}],
        }
    ]
    with pytest.raises(DataError, match="row 0 .*nested too deeply"):
        given_rows(rows, DatasetConfig(source="python"), "data.train", **form)

"""Rows that a program hands over: sequences of mappings, data sets, and what is neither."""

from types import SimpleNamespace
from typing import Any

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

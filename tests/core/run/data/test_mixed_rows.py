"""Rows of several sets as one sequence."""

import numpy as np
import pytest

from rlcore.run.data.mixes import MixedRows, of_set
from rlcore.spi import DataError

SETS = {"sums": [{"prompt": f"{n}"} for n in range(3)], "words": [{"prompt": "a"}, {"prompt": "b"}]}
ALL = [{"prompt": row["prompt"], "data_set": name} for name, rows in SETS.items() for row in rows]


def test_rows_stand_one_set_after_another_with_its_name():
    rows = MixedRows(SETS)
    assert [rows[number] for number in range(len(rows))] == list(rows) == ALL
    assert [rows[-1], rows[np.int64(2)]] == [ALL[4], ALL[2]]
    assert list(rows[1:4]) == ALL[1:4]
    assert rows.starts == (0, 3, 5)
    assert rows.names_of(np.array([0, 2, 3, 4])) == ["sums", "sums", "words", "words"]


def test_a_row_of_no_mix_stays_as_it_is_and_a_field_is_never_replaced():
    row = {"data_set": "own"}
    assert of_set(row, None) is row
    with pytest.raises(DataError, match="'sums' with a field 'data_set'"):
        of_set(row, "sums")

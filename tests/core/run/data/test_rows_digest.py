"""Rows with the same fields have the same digest, whoever reads them and whenever."""

import datetime
import os
import subprocess
import sys

import numpy as np
import pytest

from rlcore.run.data.rows_digest import NUM_LOOKED_AT, rows_digest, sampled
from rlcore.spi import LazyRows

ROW = {
    "prompt": [{"role": "user", "content": "a\ud800"}],
    "number": 1,
    "weights": np.arange(3),
    "day": datetime.date(2026, 1, 2),
}


@pytest.mark.parametrize(
    "other",
    [
        {**ROW, "prompt": [{"role": "user", "content": "b"}]},
        {**ROW, "number": 2},
        {**ROW, "weights": np.array([0, 1, 3])},
        {**ROW, "day": datetime.date(2026, 1, 3)},
        {**ROW, "image": b"1"},
    ],
)
def test_another_value_is_another_digest(other):
    assert rows_digest([ROW]) == rows_digest([dict(ROW)]) != rows_digest([other])


LOOP: dict[str, object] = {}
LOOP["own"] = LOOP


@pytest.mark.parametrize("value", [LOOP, 10**5000, {(1, 2): 3, "a": LOOP}], ids=["loop", "long", "keys"])
def test_rows_that_json_cannot_hold_count_by_their_fields(value):
    assert rows_digest([{"prompt": value}]) == rows_digest([{"prompt": value}]) != rows_digest([{"question": value}])


def test_the_order_counts_and_so_does_each_row():
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    assert len({rows_digest(taken) for taken in (rows, rows[::-1], rows[:1], rows * 2)}) == 4


def test_no_address_and_no_order_of_a_set_is_in_it():
    program = (
        "from rlcore.run.data.rows_digest import rows_digest\n"
        "class Image: pass\n"
        "print(rows_digest([{'prompt': 'a', 'image': Image(), 'names': {'x', 'y', 'z'}, (1, 2): 3}]))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1


def test_of_many_rows_some_are_looked_at_and_their_number():
    made = []
    rows = LazyRows(10**9, lambda number: made.append(number) or {"prompt": number})
    digest = rows_digest(sampled(rows))
    assert len(set(made)) == NUM_LOOKED_AT
    assert {made[0], made[-1]} == {0, 10**9 - 1}
    assert digest != rows_digest(sampled(rows[:-1]))
    assert [row.get("prompt") for row in sampled(rows[:3])] == [None, 0, 1, 2]
    assert list(sampled(rows[:0])) == [{"rows": 0}]

"""Rows that are made as they are taken."""

import pytest

from rlcore.spi import LazyRows, Row


@pytest.fixture
def made() -> list[int]:
    """The numbers of the rows made so far."""
    return []


@pytest.fixture
def rows(made: list[int]) -> LazyRows:
    def make(number: int) -> Row:
        made.append(number)
        return {"number": number}

    return LazyRows(9, make)


def test_a_row_is_made_when_it_is_taken(rows: LazyRows, made: list[int]) -> None:
    assert (len(rows), made) == (9, [])
    assert (rows[3], rows[-1], made) == ({"number": 3}, {"number": 8}, [3, 8])


@pytest.mark.parametrize("part", [slice(2, 7), slice(None, None, -2), slice(5, 2), slice(-3, None)])
def test_a_slice_makes_those_of_the_whole(rows: LazyRows, made: list[int], part: slice) -> None:
    taken = rows[part][1:]
    assert made == []
    assert [row["number"] for row in taken] == list(range(9))[part][1:]


def test_there_is_none_beyond_the_end(rows: LazyRows) -> None:
    with pytest.raises(IndexError):
        rows[9]

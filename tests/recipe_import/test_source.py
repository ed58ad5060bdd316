"""Values that are taken once, or told of."""

import pytest

from rlcore_import import nemo_rl_keys, verl_keys
from rlcore_import.source import UNKNOWN, Dropped, Source

MAPPED = {"a.b": "x", "t": "y"}
DROPPED = (Dropped(pattern="a.c", why="slow", neutral=(1,)), Dropped(pattern="a.*", why="other", changes_meaning=True))


def source(**values: object) -> Source:
    return Source(values=values, mapped=MAPPED, dropped=DROPPED)


def test_what_is_not_taken_is_told() -> None:
    values = source(a={"b": 1, "c": 2, "d": 3}, t={"u": {"v": 1}}, z=None)
    assert (values.take("a.b"), values.take("t"), values.take("a.b", 9)) == (1, {"u": {"v": 1}}, 1)
    found, num_off = values.unmapped()
    assert [(one.key, one.why, one.changes_meaning) for one in found] == [
        ("a.d", "other", True),
        ("z", UNKNOWN, True),
        ("a.c", "slow", False),
    ]
    assert num_off == 0


def test_neutral_values_and_disabled_tables_are_counted() -> None:
    found, num_off = source(a={"c": 1, "d": False, "e": None}, q={"enabled": False, "r": 5}).unmapped()
    assert (found, num_off) == ((), 5)


def test_keys_outside_of_the_table_cannot_be_taken() -> None:
    with pytest.raises(AssertionError):
        source().take("a.c")


@pytest.mark.parametrize("module", [nemo_rl_keys, verl_keys])
def test_no_key_is_mapped_and_dropped_by_its_own_name(module: object) -> None:
    patterns = {one.pattern for one in module.DROPPED if "*" not in one.pattern}  # type: ignore[attr-defined]
    assert not patterns & set(module.MAPPED)  # type: ignore[attr-defined]

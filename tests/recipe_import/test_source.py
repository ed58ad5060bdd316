"""Each value is mapped once, or reported."""

from typing import Any

import pytest

from rlcore.spi import ConfigError
from rlcore_import import nemo_rl_keys, verl_keys
from rlcore_import.source import UNKNOWN, UNREAD, Dropped, Source, differs, same

MAPPED = {"a.b": "x", "t": "y", "n": "z", "a.enabled": "s"}
DROPPED = (
    Dropped(pattern="a.c", why="slow", neutral=(1,)),
    *differs("a", "other", "d e f"),
    *same("q", "another", "enable"),
    *same("", "log", "q.*"),
)


def source(**values: object) -> Source:
    return Source(values=values, mapped=MAPPED, dropped=DROPPED)


def reported(of: Source) -> list[tuple[str, str, bool]]:
    return [(one.key, one.why, one.changes_meaning) for one in of.recipe({}).unmapped]


def test_what_is_not_taken_is_reported_and_what_nobody_listed_first() -> None:
    values = source(a={"b": 1, "c": 2, "d": 3, "x": 4}, t={"u": {"v": 1}}, n=2, z=None)
    assert (values.take("a.b"), values.take("t"), values.take("a.b", 9)) == (1, {"u": {"v": 1}}, 1)
    values.report("a.b", "is another", changes_meaning=False)
    assert reported(values) == [
        ("a.x", UNKNOWN, True),
        ("z", UNKNOWN, True),
        ("a.d", "other", True),
        ("n", UNREAD, True),
        ("a.b", "is another", False),
        ("a.c", "slow", False),
    ]


def test_neutral_values_and_disabled_tables_are_counted() -> None:
    values = source(a={"c": 1, "d": False, "e": None}, q={"enable": False, "r": 5})
    found = values.recipe({})
    assert (found.unmapped, found.num_off) == ((), 5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"a": {"c": True}}, [("a.c", "slow", False)]),  # True is not 1
        ({"a": {"c": False}}, [("a.c", "slow", False)]),  # a row with neutral values has no others
        ({"a": {"enabled": False, "d": 3}}, []),
        ({"a": {"enabled": False, "x": 3}}, [("a.x", UNKNOWN, True)]),
        ({"w": {"enabled": False, "x": 3}}, [("w.enabled", UNKNOWN, True), ("w.x", UNKNOWN, True)]),
        ({"w": {}}, [("w", UNKNOWN, True)]),
        ({"q": {"enable": True, "r": 5}}, [("q.enable", "another", False), ("q.r", "log", False)]),
    ],
)
def test_only_listed_switches_and_values_count_as_off(values: dict[str, Any], expected: list[tuple[str, str, bool]]) -> None:
    assert reported(source(**values)) == expected


def test_tables_that_the_library_does_not_read_are_counted_but_for_what_nobody_listed() -> None:
    values = source(a={"d": 3, "x": 4}, n=2)
    values.ignore("a", "n")
    assert reported(values) == [("a.x", UNKNOWN, True)]


def test_keys_outside_of_the_table_cannot_be_taken() -> None:
    with pytest.raises(AssertionError):
        source().take("a.c")


@pytest.mark.parametrize(
    ("method", "value", "expected"),
    [
        ("integer", 3, 3),
        ("integer", "3", 3),
        ("integer", 3.0, 3),
        ("number", "1e-6", 1e-6),
        ("number", 2, 2.0),
        ("flag", "True", True),
        ("flag", False, False),
        ("text", 5, "5"),
        ("table", {"x": 1}, {"x": 1}),
    ],
)
def test_values_are_of_their_type(method: str, value: object, expected: object) -> None:
    assert getattr(source(n=value), method)("n") == expected


@pytest.mark.parametrize(
    ("method", "value"),
    [
        *(("integer", value) for value in (2.5, float("inf"), float("nan"), True, "x", [], {}, 0, -1, 1e30, 10**22, 10**400)),
        *(("number", value) for value in (float("inf"), float("nan"), False, "x", [1], {"x": 1}, 0)),
        *(("flag", value) for value in (1, "yes", [], {"x": True})),
        *(("text", value) for value in ([], {"x": 1})),
        *(("table", value) for value in (1, [1], "x")),
    ],
)
def test_values_of_another_type_or_range_name_their_key(method: str, value: object) -> None:
    values = source(n=value)
    with pytest.raises(ConfigError, match="n: found") as error, values.checked():
        getattr(values, method)("n", **({"least": 1} if method in ("integer", "number") else {}))
    assert "expected" in str(error.value)


def test_all_problems_are_reported_at_once_and_infinity_where_it_may_be() -> None:
    values = source(n=float("inf"), a={"b": "x"})
    with pytest.raises(ConfigError) as error, values.checked():
        assert values.number("n", infinite=True) == float("inf")
        values.integer("n", 1)
        values.number("a.b", 1.0)
    assert [one.path for one in error.value.problems] == ["n", "a.b"]


def test_a_long_value_is_shown_in_short() -> None:
    values = source(n={str(number): number for number in range(100)})
    with pytest.raises(ConfigError) as error, values.checked():
        values.text("n")
    assert len(error.value.problems[0].found) <= 80


@pytest.mark.parametrize("compute", [lambda found: 1 // found, lambda found: int(float("inf")) + found])
def test_arithmetic_that_fails_names_the_last_key(compute: Any) -> None:
    values = source(n=0)
    with pytest.raises(ConfigError, match="n: found"), values.checked():
        compute(values.take("n"))


@pytest.mark.parametrize("module", [nemo_rl_keys, verl_keys])
def test_no_key_is_mapped_and_dropped_by_its_own_name(module: object) -> None:
    patterns = {one.pattern for one in module.DROPPED if "*" not in one.pattern}  # type: ignore[attr-defined]
    assert not patterns & set(module.MAPPED)  # type: ignore[attr-defined]

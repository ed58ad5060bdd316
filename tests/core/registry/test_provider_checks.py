"""Fields of config classes: types that a recipe can hold and defaults of these types; and all that pass are converted."""

import datetime
import enum
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NewType

import attrs
import pytest
from attrs import frozen

from rlcore.registry.discovery import Registry
from rlcore.registry.provider_checks import field_problems
from rlcore.schema.constraints import between
from rlcore.schema.structure import structure


class Colour(enum.Enum):
    RED = "red"


class Text(enum.StrEnum):
    A = "a"


@frozen(kw_only=True)
class Inner:
    a: int = 1


@frozen(kw_only=True)
class WrongInner:
    a: int = "one"


Steps = NewType("Steps", int)
GOOD = [
    (bool, True),
    (int, 1),
    (float, 1),
    (float, float("inf")),
    (str, "text"),
    (Path, Path("x")),
    (Path | None, None),
    (int | None, 3),
    (int | Literal["auto"], "auto"),
    (Literal["a", 1], 1),
    (tuple[float, float], (0.9, 1)),
    (tuple[int, ...], ()),
    (list[int], attrs.Factory(lambda: [1])),
    (frozenset[str], frozenset({"a"})),
    (Sequence[str], ("a",)),
    (tuple, (1, "a")),
    (Mapping[str, float], attrs.Factory(lambda: {"x": 1.0})),
    (dict[str, dict[str, int]], attrs.Factory(lambda: {"a": {"b": 1}})),
    (Mapping[str, object], attrs.Factory(dict)),
    (Inner, Inner()),
    (Inner | None, None),
    (tuple[Inner, ...], (Inner(),)),
    (Any, None),
    (object, "x"),
    (Annotated[int, "steps"], 1),
    (Steps, 1),
]


def config_of(tp, default=attrs.NOTHING, **options):
    return attrs.make_class("Config", {"x": attrs.field(type=tp, default=default, **options)}, frozen=True, kw_only=True)


@pytest.mark.parametrize(("tp", "default"), GOOD)
def test_what_a_recipe_can_hold_passes_and_is_converted(tp, default):
    config = config_of(tp, default)
    assert list(field_problems(config)) == []
    assert structure({}, config, "trainer.fake") == (config(), [])


@pytest.mark.parametrize(
    ("tp", "shown"),
    [
        (Colour, "Colour"),
        (Text, "Text"),
        (datetime.date, "date"),
        (bytes, "bytes"),
        (complex, "complex"),
        (Callable[[int], int], "Callable[[int], int]"),
        (Colour | None, "Colour"),
        (tuple[Colour, ...], "Colour"),
        (dict[str, list[Colour]], "Colour"),
        (dict[int, str], "int"),
        (None, "none given"),
    ],
)
def test_a_type_that_no_recipe_can_hold_is_named_with_those_that_it_can(tp, shown):
    (problem,) = field_problems(config_of(tp))
    assert problem.startswith("Config.x is of type ")
    assert shown in problem
    assert "expected bool, int, float, str, Path, Literal, attrs classes, arrays and tables" in problem


@pytest.mark.parametrize(
    ("tp", "default"),
    [
        (int, "five"),
        (int, True),
        (int, None),
        (float, "1.0"),
        (float, float("nan")),
        (str, 1),
        (Path, "x"),
        (Literal["a", "b"], "c"),
        (Literal[1], True),
        (tuple[int, ...], [1]),
        (tuple[int, ...], ("a",)),
        (int | None, "x"),
        (dict[str, int], attrs.Factory(lambda: {"a": "b"})),
        (Inner, None),
        (object, datetime.date(2020, 1, 1)),
    ],
)
def test_a_default_of_another_type_is_named(tp, default):
    (problem,) = field_problems(config_of(tp, default))
    assert problem.startswith("Config.x has the default ")
    assert "; expected one of its type, " in problem


@frozen(kw_only=True)
class Untyped:
    sizes: tuple = ()


def test_a_default_outside_its_range_is_named():
    """A run writes it into its recipe, which would then be refused."""
    few = Annotated[int, between(2, 8)]
    assert list(field_problems(config_of(few, 2))) == []
    (problem,) = field_problems(config_of(few, 1))
    assert problem == "Config.x has the default 1; expected an integer from 2 to 8, by the field's range"


@pytest.mark.parametrize(
    ("tp", "default", "place"),
    [
        (tuple[int | None, ...], (1, None), "type"),
        (tuple[int | None, ...], attrs.NOTHING, "type"),
        (Sequence[int | None], (), "type"),
        (Mapping[str, list[str | None]] | None, None, "type"),
        (tuple, (1, None), "default"),
        (object, [[None]], "default"),
        (frozenset, frozenset({None}), "default"),
        (Mapping[str, object], attrs.Factory(lambda: {"a": [None]}), "default"),
        (Untyped, Untyped(sizes=(None,)), "default"),
    ],
)
def test_none_as_an_item_of_an_array_is_refused(tp, default, place):
    (problem,) = field_problems(config_of(tp, default))
    assert problem.startswith(f"Config.x has None as an item of an array in its {place}: TOML cannot say it; ")


def test_none_in_a_table_is_a_key_left_out():
    assert list(field_problems(config_of(dict[str, int | None], attrs.Factory(lambda: {"a": None})))) == []


def test_what_a_converter_makes_of_a_default_is_not_judged():
    assert list(field_problems(config_of(tuple[int, ...], [1], converter=tuple))) == []


def test_nested_classes_are_looked_into():
    (problem,) = field_problems(config_of(tuple[WrongInner, ...], ()))
    assert problem == "WrongInner.a has the default 'one'; expected one of its type, int"


@frozen(kw_only=True)
class Unresolvable:
    x: "Missing" = None  # type: ignore[name-defined]  # noqa: F821


@frozen(kw_only=True)
class RefusesDefaults:
    x: int = 1

    def __attrs_post_init__(self):
        raise TypeError("never")


@frozen(kw_only=True)
class RefusesWithRequired:
    y: int
    x: int = 1

    def __attrs_post_init__(self):
        raise TypeError("never")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Unresolvable, "the types of config class Unresolvable cannot be resolved: NameError: name 'Missing'"),
        (RefusesDefaults, "config class RefusesDefaults refuses its defaults: TypeError: never; expected defaults"),
        (RefusesWithRequired, None),
        (config_of(Colour), "Config.x is of type Colour"),
    ],
)
def test_the_provider_is_unfit(make_provider, config, text):
    (entry,) = Registry.from_providers({"trainer": [make_provider(config=config)]}).of("trainer")
    assert (text in entry.error) if text else entry.error is None

"""Describes a config class: its fields, their types in words, and their docstrings."""

import ast
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import tomli_w

from rlcore.schema.constraints import Constraint
from rlcore.schema.types import alternatives, constraints, is_array, is_table, is_union, item_type, plain

SCALARS: Mapping[object, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Path: "a path"}
PLURALS: Mapping[object, str] = {bool: "booleans", int: "integers", float: "numbers", str: "strings", Path: "paths"}

WORDS = "rlcore.words"
"""Key of a field's metadata: other words that a recipe may write, each with the value that it stands for."""
NO_KEY = "rlcore.no_key"
"""Key of the metadata of a field that no recipe sets by its name."""


@functools.cache
def fields(cls: type) -> Mapping[str, "attrs.Attribute[Any]"]:
    """The fields that a recipe may set, by their keys, with their types resolved."""
    attrs.resolve_types(cls)
    return {key_of(one): one for one in attrs.fields(cls) if one.init and NO_KEY not in one.metadata}


def key_of(attribute: "attrs.Attribute[Any]") -> str:
    """A field's key in a recipe: its name, without the underscore behind a word of Python's own (`async_`)."""
    return attribute.name.rstrip("_")


def default_of(attribute: "attrs.Attribute[Any]") -> Any:
    """A field's default, or what its factory makes; attrs.NOTHING where it has none."""
    default: Any = attribute.default
    return default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]


@functools.cache
def docs(cls: type) -> Mapping[str, str]:
    """Each field's docstring on one line, "" where there is none, read from the source of the class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for statement, following in itertools.pairwise(body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return {key: found.get(attribute.name, "") for key, attribute in fields(cls).items()}


def expectation(tp: object) -> str:
    """Describe the values that a recipe may write for the type: "an integer of at least 1", 'one of "a", "b"'."""
    if conditions := constraints(tp):
        return conditioned(expectation(plain(tp)), conditions)
    tp = plain(tp)
    if is_union(tp):
        return " or ".join(map(expectation, alternatives(tp)))
    if typing.get_origin(tp) is Literal:
        choices = [toml_literal(choice) for choice in typing.get_args(tp) if choice is not None]
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if is_array(tp):
        item = item_type(tp)
        items = conditioned(PLURALS.get(plain(item), expectation(plain(item))), constraints(item))
        return "an array" if item is object else f"an array of {items}"
    if is_table(tp):
        return "a table"
    return SCALARS.get(tp, "a value" if tp in (object, Any) else getattr(tp, "__name__", str(tp)))


def conditioned(words: str, conditions: Sequence[Constraint]) -> str:
    """A type in words with what holds besides: after a list of choices, a comma."""
    return (", " if ", " in words else " ").join([words, *(condition.words for condition in conditions)])


def describe_value(value: object) -> str:
    """A value of a recipe, cut to a sensible length, with its type: '"five" (a string)'."""
    match value:
        case bool():
            return toml_literal(value)
        case None:
            return "None"
        case int():
            kind = "an integer"
        case float():
            kind = "a number"
        case str():
            kind = "a string"
        case Mapping():
            return "a table"
        case list():
            return f"an array of {len(value)}"
        case _:
            kind = f"a {type(value).__name__}"
    text = toml_literal(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({kind})"


def toml_literal(value: object) -> str:
    """A value as TOML writes it on one line; keys of a table that are None are left out. ValueError for any other None."""
    if isinstance(value, Mapping):
        pairs = (f"{toml_key(key)} = {toml_literal(item)}" for key, item in value.items() if item is not None)
        return "{" + ", ".join(pairs) + "}"
    if value is None:
        raise ValueError("found None, which TOML cannot say; expected a value, or a key of a table left out")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_literal, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 256:  # Python writes no number of thousands of digits
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")
    return str(value)


def toml_key(name: str) -> str:
    """A key as TOML writes it, with quotes where it needs them."""
    return tomli_w.dumps({name: 0}).rpartition(" = ")[0]

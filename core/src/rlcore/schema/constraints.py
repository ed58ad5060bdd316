"""Constraints on the value of a field, written in its type: `num_steps: Annotated[int, at_least(1)] = 100`."""

import math
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from attrs import frozen

from rlcore.schema.file_limits import has_home


@frozen
class Constraint:
    """One condition on a value, in words that follow those of its type: "an integer" "of at least 1"."""

    words: str
    accepts: Callable[[Any], bool]
    remedy: str = ""


def at_least(least: float, remedy: str = "") -> Constraint:
    """Finite, and `least` or more."""
    return Constraint(f"of at least {least:g}", lambda value: least <= value < math.inf, remedy)


def above(bound: float, remedy: str = "") -> Constraint:
    """Finite, and more than `bound`."""
    return Constraint(f"above {bound:g}", lambda value: bound < value < math.inf, remedy)


def between(least: float, most: float, remedy: str = "") -> Constraint:
    """Accept numbers from `least` to `most`, both included."""
    return Constraint(f"from {least:g} to {most:g}", lambda value: least <= value <= most, remedy)


def at_least_below(least: float, bound: float, remedy: str = "") -> Constraint:
    """`least` or more, and less than `bound`."""
    return Constraint(f"of at least {least:g} and below {bound:g}", lambda value: least <= value < bound, remedy)


def above_at_most(bound: float, most: float, remedy: str = "") -> Constraint:
    """More than `bound`, and at most `most`."""
    return Constraint(f"above {bound:g} and at most {most:g}", lambda value: bound < value <= most, remedy)


def not_empty(remedy: str = "") -> Constraint:
    """A text that holds more than white space."""
    return Constraint("that is not empty", lambda value: bool(value.strip()), remedy)


KNOWN_HOME = Constraint(
    "without NUL, where a leading ~ or ~name is a user's home",
    has_home,
    "Name a user that there is, or write the whole path; a folder that is called so itself is ./~name.",
)

Positive: TypeAlias = Annotated[int, at_least(1)]
Count: TypeAlias = Annotated[int, at_least(0)]
Seconds: TypeAlias = Annotated[float, Constraint("of seconds above 0", lambda value: 0 < value < math.inf)]
Finite: TypeAlias = Annotated[float, Constraint("that is finite", math.isfinite)]
Share: TypeAlias = Annotated[float, between(0, 1)]
Text: TypeAlias = Annotated[str, not_empty()]
PathText: TypeAlias = Annotated[str, KNOWN_HOME]
"""A path that `rlcore.schema.file_limits.expanded` is called with."""


@frozen
class PathBesideRecipe:
    """Marks the type of a plugin's path: a relative one starts from the folder of the file in which the recipe says it."""

    names_function: bool = False
    """True for "file.py:function", whose file may lie in the working directory too; "module:function" stays as it is."""


FileText: TypeAlias = Annotated[str, KNOWN_HOME, PathBesideRecipe()]
"""A path of a file. The plugin gets it absolute."""
FunctionText: TypeAlias = Annotated[str, KNOWN_HOME, PathBesideRecipe(names_function=True)]
"""A function, as "file.py:function" or "module:function". The plugin gets the file's path absolute."""

"""What a rule on a recipe is: a check, and the keys that it reads."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from attrs import frozen

from rlcore.config.recipe import Recipe
from rlcore.schema import describe
from rlcore.spi import Problem

Check: TypeAlias = Callable[[Recipe], Iterator[Problem]]


@frozen
class Rule:
    """One check and the keys it reads."""

    keys: tuple[str, ...]
    check: Check

    def reads_any(self, broken: Sequence[str]) -> bool:
        """Whether a key is, contains or lies below one of `broken`."""
        return any(
            f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.") for key in self.keys for other in broken
        )


RULES: list[Rule] = []


def rule(*keys: str) -> Callable[[Check], Check]:
    """Registers a check that reads `keys`."""

    def register(check: Check) -> Check:
        RULES.append(Rule(keys, check))
        return check

    return register


def value_at(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key; None where a table on the way is None."""
    value: Any = recipe
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    return value


def within(key: str, expected: str, accepts: Callable[[Any], bool], remedy: str = "") -> None:
    """Registers a rule on one key alone; None, where the key may be it, is always accepted."""

    @rule(key)
    def check(recipe: Recipe) -> Iterator[Problem]:
        value = value_at(recipe, key)
        if value is not None and not accepts(value):
            yield Problem(path=key, found=_shown(value), expected=expected, remedy=remedy)


def _shown(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) else describe.toml_literal(value)


def at_least(least: int, *keys: str, remedy: str = "") -> None:
    """Registers a lower bound on integers."""
    for key in keys:
        within(key, f"an integer of at least {least}", lambda value: bool(value >= least), remedy)


def positive_seconds(key: str) -> None:
    """Registers that a time is finite and not 0."""
    within(key, "a number of seconds above 0", lambda value: value > 0 and math.isfinite(value))


def not_empty(key: str, remedy: str = "") -> None:
    """Registers that a text holds more than white space."""
    within(key, "a text that is not empty", lambda value: bool(value.strip()), remedy)

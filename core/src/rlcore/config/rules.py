"""What a rule on a recipe is: a check, and the keys that it reads."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from attrs import frozen

from rlcore.config.recipe import Recipe
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

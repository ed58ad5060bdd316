"""Data of a report on the recipes of runs, and on the keys in which they differ."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlcore.run.storage.recipe_changes import LOCATION_KEYS

ABSENT = "none"
"""The text for a key that a recipe does not have, or leaves at None."""


def flat(recipe: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys such as "optimizer.learning_rate" with their values as text."""
    for name, value in recipe.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", repr(value)


def differences(recipes: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Keys whose values are not the same in all recipes, with the value of each, sorted; where a run lies is no difference."""
    keys = sorted({key for recipe in recipes for key in recipe} - {*LOCATION_KEYS})
    values = {key: [recipe.get(key, ABSENT) for recipe in recipes] for key in keys}
    return [(key, each) for key, each in values.items() if len(set(each)) > 1]

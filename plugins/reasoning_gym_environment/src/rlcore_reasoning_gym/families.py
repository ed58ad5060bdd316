"""The families of reasoning-gym, and their data sets."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import reasoning_gym
from attrs import frozen
from reasoning_gym.factory import CURRICULA, DATASETS

FAMILIES = tuple(sorted(set(DATASETS) - {"composite"}))
"""All but the mixture of other families, which `families` is here."""
RESERVED = ("seed", "size")
"""Options that this environment sets itself."""
FOLLOW_HASH_SEED = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note"})
"""Families whose problems follow from the order of sets: another one in each process, unless PYTHONHASHSEED is set."""


@frozen(kw_only=True)
class Family:
    """A family with options, at one level."""

    name: str
    level: int | None = None
    """By the family's curriculum; None for its own defaults."""
    options: Mapping[str, Any]

    def data_set(self, seed: int, size: int) -> Any:
        """reasoning-gym's data set of such problems: problem i follows from the seed and i. Whatever the family raises over its
        options passes through."""
        given = {**self.options, "seed": seed, "size": size}
        if self.level is None:
            return reasoning_gym.create_dataset(self.name, **given)
        curriculum = reasoning_gym.factory.create_curriculum(self.name)
        curriculum.set_global_level(self.level)
        made = replace(curriculum.generate_configuration(), **given)
        return DATASETS[self.name][0](made)  # which validates the options


def option_names(family: str) -> list[str]:
    """The options that a recipe may give a family."""
    return [option.name for option in fields(DATASETS[family][1]) if option.name not in RESERVED]


def num_levels(family: str) -> int:
    """How many levels the family's curriculum has; 0 where it has no curriculum."""
    if family not in CURRICULA:
        return 0
    attributes = reasoning_gym.factory.create_curriculum(family).attributes
    return max((len(attribute.levels) for attribute in attributes.values()), default=0)

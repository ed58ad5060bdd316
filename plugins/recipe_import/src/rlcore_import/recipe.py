"""What `rlcore import` asks of a package that reads another library's recipes.

In `pyproject.toml`::

    [project.entry-points."rlcore.importers"]
    theirs = "my_package.theirs:import_recipe"

The function is called as import_recipe(Path, Sequence[str]) with a file and what stands behind it, KEY=VALUE as that library
writes it, and returns an ImportedRecipe; ConfigError where the file cannot be read as one of its recipes.
"""

from collections.abc import Mapping
from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class Unmapped:
    """A key of another library's recipe that has no counterpart, or not the same meaning."""

    key: str
    value: Any
    why: str
    changes_meaning: bool
    """Whether what is trained differs for it; without it speed, memory or what is logged does."""


@frozen(kw_only=True)
class ImportedRecipe:
    """A recipe, and what is not in it."""

    values: Mapping[str, Any]
    """Values of TOML by the dotted keys of a recipe."""
    unmapped: tuple[Unmapped, ...]
    num_off: int = 0
    """Keys beside these that switch off what there is no counterpart of."""

"""Makes the paths in plugins' sections absolute, where a field's type says that it is one of a file beside the recipe."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from rlcore.config.load import RawRecipe
from rlcore.schema import describe
from rlcore.schema.constraints import PathBesideRecipe
from rlcore.schema.homes import expanded, has_home
from rlcore.schema.types import marks


def with_plugin_paths(raw: RawRecipe, sections: Mapping[str, Mapping[str, type]]) -> RawRecipe:
    """Return the recipe with these paths; `sections` has each installed plugin's config class, by role and name."""
    values = copy.deepcopy(dict(raw.values))
    for role, name, key, mark in _fields(sections):
        table = values.get(role)
        section = table.get(name) if isinstance(table, dict) else None
        origin = raw.origins.get((role, name, key))
        if isinstance(section, dict) and key in section and origin is not None:
            section[key] = _absolute(section[key], origin.directory, mark)
    return evolve(raw, values=values)


def _fields(sections: Mapping[str, Mapping[str, type]]) -> list[tuple[str, str, str, PathBesideRecipe]]:
    return [
        (role, name, key, mark)
        for role, plugins in sections.items()
        for name, cls in plugins.items()
        for key, attribute in describe.fields(cls).items()
        for mark in marks(attribute.type, PathBesideRecipe)
    ]


def _absolute(value: Any, directory: Path, mark: PathBesideRecipe) -> Any:
    """A path, or an array of such, in a directory. A function's file that is not there may lie in the working directory."""
    if isinstance(value, list):
        return [_absolute(item, directory, mark) for item in value]
    file, end = value if isinstance(value, str) else "", ""
    if mark.names_function:
        file, colon, function = file.rpartition(":")
        end = f"{colon}{function}"
    if not has_home(file) or not isinstance(value, str):
        return value
    candidate = directory / expanded(file)
    if mark.names_function and not (file.endswith(".py") and (candidate.is_file() or not Path(file).is_file())):
        return value
    return f"{os.path.normpath(candidate)}{end}"

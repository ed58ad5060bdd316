"""Reads YAML files that inherit from the paths in `defaults`, as NeMo-RL's do, and applies KEY=VALUE arguments."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlcore.schema.file_limits import read_file
from rlcore.spi import ConfigError, Problem
from rlcore_import.override_values import value_of

DEFAULTS = "defaults"
OVERRIDE = "_override_"
"""NeMo-RL's key that stops a table from inheriting."""
MISSING = "???"
"""OmegaConf's mark of a value that the user must set."""
MOST_FILES = 32
_OVERRIDE = re.compile(r"\+{0,2}([\w.\-@/]+)=(.*)", re.DOTALL)
_DELETION = re.compile(r"~([\w.\-]+)(?:=(.*))?", re.DOTALL)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A SafeLoader that reads 1e-6 as a number and a date as a text, and refuses a key that comes twice, as OmegaConf does.

    It uses libyaml where available.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012
        sign: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for sign, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise yaml.constructor.ConstructorError(problem=f"found twice: {', '.join(twice)}", problem_mark=node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)|[0-9][0-9_]*\.[0-9_]*|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|\.inf|\.Inf|\.nan|\.NaN|-\.inf)$"
    ),
    list("-+0123456789."),
)


def error(path: Path | str, found: str, expected: str, remedy: str = "") -> ConfigError:
    """Return the ConfigError of one problem with a file."""
    return ConfigError([Problem(path=str(path), found=found, expected=expected, remedy=remedy)])


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the table of one file, without inherited values. ConfigError where the file holds no table."""
    try:
        found = yaml.load(read_file(path).decode(), _Loader)
    except OSError as problem:
        raise error(path, problem.strerror or str(problem), "a YAML file that can be read") from problem
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        raise error(path, " ".join(str(problem).split()), "YAML") from problem
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise error(path, f"a {type(found).__name__}", "a table of keys")
    return found


def read_inherited(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a file merged over the files that its `defaults` name by relative paths."""
    path = path.resolve()
    if path in above or len(above) > MOST_FILES:
        raise error(path, "defaults that name each other in a circle", "files that end somewhere")
    values = read_yaml(path)
    named = values.pop(DEFAULTS, None)
    bases = [] if named is None else [named] if isinstance(named, str) else named
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise error(path, f"defaults = {named!r}", "a path, or a list of paths")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = _over(merged, read_inherited(path.parent / base, (*above, path)))
    return _over(merged, values)


def _over(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge, but replace a table of `base` whose counterpart in `above` has `_override_: true`."""
    replaced = [key for key, value in above.items() if isinstance(value, Mapping) and value.get(OVERRIDE)]
    unmarked = {key: {k: v for k, v in above[key].items() if k != OVERRIDE} for key in replaced}
    return merge({key: value for key, value in base.items() if key not in replaced}, {**above, **unmarked})


def below(package: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values inside nested tables of a dotted name."""
    for name in reversed(package.split(".") if package else ()):
        values = {name: values}
    return values


def merge(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; any other value of `above` but `???` replaces that of `base`, as in OmegaConf."""
    merged = dict(base)
    for key, value in above.items():
        if key in merged and value == MISSING:
            continue
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the values with arguments KEY=VALUE applied, by hydra's grammar with `+key`, `++key` and `~key`."""
    merged = dict(values)
    for override in overrides:
        text = override.strip()
        if deletion := _DELETION.fullmatch(text):
            merged = _without(merged, deletion[1].split("."), text)
            continue
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            raise error(override, "no KEY=VALUE", "such as algorithm.adv_estimator=grpo, or ~KEY to leave a key out")
        merged = _with(merged, match[1].split("."), value_of(match[2]), text)
    return merged


def _with(found: Any, names: Sequence[str], value: Any, override: str) -> Any:
    """Return what is found at a key with a value set below it; a number names an element of a list."""
    if not names:
        return merge(found, value) if isinstance(found, Mapping) and isinstance(value, Mapping) else value
    first, *others = names
    if isinstance(found, list):
        if not first.isdecimal() or int(first) >= len(found):
            raise error(override, f"{first} below a list of {len(found)}", "the number of an element, from 0")
        number = int(first)
        return [*found[:number], _with(found[number], others, value, override), *found[number + 1 :]]
    table = found if isinstance(found, Mapping) else {}
    return {**table, first: _with(table.get(first), others, value, override)}


def _without(values: Mapping[str, Any], names: Sequence[str], override: str) -> dict[str, Any]:
    """Return the values without a key. ConfigError where the key is missing."""
    first, *others = names
    if first not in values or (others and not isinstance(values[first], Mapping)):
        raise error(override, "no such key", "a key that the recipe has")
    if others:
        return {**values, first: _without(values[first], others, override)}
    return {key: value for key, value in values.items() if key != first}

"""Reading YAML that inherits: `defaults` as a path, as NeMo-RL has it, or as hydra's list of groups; and KEY=VALUE."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlcore.spi import ConfigError, Problem

DEFAULTS = "defaults"
SELF = "_self_"
MOST_FILES = 32
_OVERRIDE = re.compile(r"[+~]{0,2}([\w.\-@/]+)=(.*)", re.DOTALL)


class _Loader(yaml.SafeLoader):
    """As SafeLoader, but 1e-6 is a number, as YAML 1.2 and OmegaConf have it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?(?:[eE][-+]?[0-9]+)|[0-9][0-9_]*\.[0-9_]*|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|\.inf|\.Inf|\.nan|\.NaN|-\.inf)$"
    ),
    list("-+0123456789."),
)


def error(path: Path | str, found: str, expected: str, remedy: str = "") -> ConfigError:
    """One problem with a file."""
    return ConfigError([Problem(path=str(path), found=found, expected=expected, remedy=remedy)])


def read_yaml(path: Path) -> dict[str, Any]:
    """One file, without what it inherits. ConfigError where it is no table."""
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), _Loader)
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
    """A file over those that its `defaults` name, each as a path relative to it."""
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
        merged = merge(merged, read_inherited(path.parent / base, (*above, path)))
    return merge(merged, values)


def read_hydra(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file with the groups of its `defaults`: `- group@package: name`, `- group: name`, `- name` and `- _self_`."""
    path = path.resolve()
    if path in above or len(above) > MOST_FILES:
        raise error(path, "defaults that name each other in a circle", "files that end somewhere")
    values = read_yaml(path)
    entries = values.pop(DEFAULTS, None) or []
    if not isinstance(entries, list):
        raise error(path, f"defaults = {entries!r}", "a list of groups")
    root = above[0].parent if above else path.parent
    merged: dict[str, Any] = {}
    for entry in entries if SELF in entries else [*entries, SELF]:
        if entry == SELF:
            merged = merge(merged, values)
            continue
        file, package = _group(entry, path, root)
        if file is not None:
            merged = merge(merged, _below(package, read_hydra(file, (*above, path))))
    return merged


def _group(entry: Any, path: Path, root: Path) -> tuple[Path | None, str]:
    """The file of an entry of `defaults`, and the dotted table that it goes to."""
    if isinstance(entry, str):
        name, _, package = entry.partition("@")
        return _existing(path.parent / f"{name}.yaml", root / f"{name.removeprefix('/')}.yaml"), package
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise error(path, f"{entry!r} in defaults", "a name, or one group with its name")
    ((group, name),) = entry.items()
    group, _, package = str(group).removeprefix("optional ").removeprefix("override ").partition("@")
    if name is None or str(group).startswith("hydra/"):
        return None, ""
    file = _existing(
        path.parent / group / f"{name}.yaml", root / group.removeprefix("/") / f"{name}.yaml", path.parent / f"{name}.yaml"
    )
    return file, package if package not in ("_here_", "_global_") else ""


def _existing(*files: Path) -> Path:
    for file in files:
        if file.is_file():
            return file
    raise error(files[0], "no such file", "the file of a group in defaults", "Import from a whole checkout")


def _below(package: str, values: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(package.split(".") if package else ()):
        values = {name: values}
    return values


def merge(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables into each other; any other value takes the place of the one below."""
    merged = dict(base)
    for key, value in above.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def with_overrides(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The values with KEY=VALUE, whose values are YAML; `+key`, `++key` and `~key` as hydra has them."""
    merged = dict(values)
    for override in overrides:
        match = _OVERRIDE.fullmatch(override.strip())
        if match is None:
            raise error(override, "no KEY=VALUE", "such as algorithm.adv_estimator=grpo")
        try:
            value = yaml.load(match[2], _Loader)
        except yaml.YAMLError:
            value = match[2]
        merged = merge(
            merged, _below(match[1].replace("@", "."), value) if isinstance(value, dict) else _single(match[1], value)
        )
    return merged


def _single(key: str, value: Any) -> dict[str, Any]:
    *names, last = key.split(".")
    return _below(".".join(names), {last: value})

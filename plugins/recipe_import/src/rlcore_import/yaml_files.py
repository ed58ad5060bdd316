"""Reading YAML that inherits: `defaults` as a path, as NeMo-RL has it, or as hydra's list of groups; and KEY=VALUE."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlcore.spi import ConfigError, Problem

DEFAULTS = "defaults"
SELF = "_self_"
OVERRIDE = "_override_"
"""NeMo-RL's mark of a table that inherits nothing."""
HYDRA = "hydra"
"""hydra's own table, of which nothing but `searchpath` says something of the recipe."""
MOST_FILES = 32
_OVERRIDE = re.compile(r"(\+{0,2})([\w.\-@/]+)=(.*)", re.DOTALL)
_DELETION = re.compile(r"~([\w.\-]+)(?:=(.*))?", re.DOTALL)
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")


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
        merged = _over(merged, read_inherited(path.parent / base, (*above, path)))
    return _over(merged, values)


def _over(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """As `merge`, but a table at the top with `_override_: true` takes the place of the one below."""
    replaced = [key for key, value in above.items() if isinstance(value, Mapping) and value.get(OVERRIDE)]
    unmarked = {key: {k: v for k, v in above[key].items() if k != OVERRIDE} for key in replaced}
    return merge({key: value for key, value in base.items() if key not in replaced}, {**above, **unmarked})


def read_hydra(path: Path, above: tuple[Path, ...] = (), roots: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file with the groups of its `defaults`: `- group@package: name`, `- group: name`, `- name` and `- _self_`. Groups lie
    beside it, or in the folders `roots`: that of the first file, and those of its `hydra.searchpath`."""
    path = path.resolve()
    if path in above or len(above) > MOST_FILES:
        raise error(path, "defaults that name each other in a circle", "files that end somewhere")
    values = read_yaml(path)
    entries = values.pop(DEFAULTS, None) or []
    if not isinstance(entries, list):
        raise error(path, f"defaults = {entries!r}", "a list of groups")
    own = values.pop(HYDRA, None)
    roots = roots or (path.parent, *_search_path(own, path))
    merged: dict[str, Any] = {}
    for entry in entries if SELF in entries else [*entries, SELF]:
        if entry == SELF:
            merged = merge(merged, values)
            continue
        file, package = _group(entry, path, roots)
        if file is not None:
            merged = merge(merged, _below(package, read_hydra(file, (*above, path), roots)))
    return merged


def _search_path(own: Any, path: Path) -> list[Path]:
    """The folders of hydra's `searchpath` that are there: those of a relative one, and of a package, lie in the folder from
    which the library is started, which is taken to be this one or one around the file."""
    named = own.get("searchpath") if isinstance(own, Mapping) else None
    found = []
    for entry in named if isinstance(named, list) else ():
        kind, _, place = str(entry).rpartition("://")
        folder = place.replace(".", "/") if kind == "pkg" else place
        found += [around / folder for around in (Path.cwd(), *path.parents) if (around / folder).is_dir()][:1]
    return found


def _group(entry: Any, path: Path, roots: Sequence[Path]) -> tuple[Path | None, str]:
    """The file of an entry of `defaults`, None where there need be none, and the dotted table that it goes to."""
    if isinstance(entry, str):
        name, _, package = entry.partition("@")
        group = name.rpartition("/")[0]
        files = [path.parent / f"{name}.yaml", *(root / f"{name.removeprefix('/')}.yaml" for root in roots)]
        is_optional = False
    elif isinstance(entry, Mapping) and len(entry) == 1:
        ((key, name),) = entry.items()
        words = str(key).split()
        is_optional = "optional" in words[:-1]
        group, _, package = words[-1].partition("@") if words else ("", "", "")
        if name is None or group.startswith(f"{HYDRA}/"):
            return None, ""
        files = [path.parent / group / f"{name}.yaml", *(root / group.removeprefix("/") / f"{name}.yaml" for root in roots)]
        files.append(path.parent / f"{name}.yaml")
    else:
        raise error(path, f"{entry!r} in defaults", "a name, or one group with its name")
    file = next((file for file in files if file.is_file()), None)
    if file is None and not is_optional:
        raise error(files[0], "no such file", "the file of a group in defaults", "Import from a whole checkout")
    return file, _package(package, group, file)


def _package(named: str, group: str, file: Path | None) -> str:
    """The dotted table of a group: as `defaults` or the head of its file have it, else by the group's own name."""
    if not named and file is not None:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        heads = (_PACKAGE.match(line) for line in lines if line.lstrip().startswith("#"))
        named = next((head[1] for head in heads if head), "_group_")
    if named in ("_here_", "_global_"):
        return ""
    own = ".".join(part for part in group.split("/") if part not in ("", ".."))
    return own if named in ("", "_group_") else named


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
        text = override.strip()
        if deletion := _DELETION.fullmatch(text):
            merged = _without(merged, deletion[1].split("."), text)
            continue
        match = _OVERRIDE.fullmatch(text)
        if match is None:
            raise error(override, "no KEY=VALUE", "such as algorithm.adv_estimator=grpo, or ~KEY to leave a key out")
        value = _value(match[3])
        merged = merge(
            merged, _below(match[2].replace("@", "."), value) if isinstance(value, dict) else _single(match[2], value)
        )
    return merged


def _value(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def _without(values: Mapping[str, Any], names: Sequence[str], override: str) -> dict[str, Any]:
    """The values without a key; ConfigError where it is not there."""
    first, *others = names
    if first not in values or (others and not isinstance(values[first], Mapping)):
        raise error(override, "no such key", "a key that the recipe has")
    if others:
        return {**values, first: _without(values[first], others, override)}
    return {key: value for key, value in values.items() if key != first}


def _single(key: str, value: Any) -> dict[str, Any]:
    *names, last = key.split(".")
    return _below(".".join(names), {last: value})

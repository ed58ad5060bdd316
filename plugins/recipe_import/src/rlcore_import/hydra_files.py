"""Composes hydra configurations: with hydra-core where it is installed, else with the part of its rules that verl's files use.

That part is `defaults` with groups, packages, `_self_`, `optional`, `override` and references to other choices, and the
arguments GROUP=NAME, +GROUP=NAME and ~GROUP.
"""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import field, frozen
from yaml import YAMLError

from rlcore_import.override_values import value_of
from rlcore_import.yaml_files import DEFAULTS, MOST_FILES, below, error, merge, read_yaml, with_overrides

SELF = "_self_"
HYDRA = "hydra"
"""hydra's own table; the importer reads its `searchpath` alone."""
_HYDRAS_OWN = re.compile(r"[+~]{0,2}hydra[./@]")
"""The beginning of an argument that configures hydra itself."""
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")
_CHOICE = re.compile(r"(\+?)([\w\-/]+)(?:@([\w.\-]*))?=(.*)", re.DOTALL)
_REMOVAL = re.compile(r"~([\w\-/]+)(?:@([\w.\-]*))?(?:=.*)?", re.DOTALL)


def read_hydra(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the configuration that a file and its arguments compose to, with references unresolved.

    ConfigError where they compose to none.
    """
    path = path.resolve()
    behind = with_overrides({}, [one for one in overrides if one.lstrip("+").startswith(f"{HYDRA}.searchpath=")])
    roots = (path.parent, *_search_path(read_yaml(path).get(HYDRA), path), *_search_path(behind.get(HYDRA), path))
    composed = _by_hydra if find_spec(HYDRA) is not None else _by_files
    return {name: values for name, values in composed(path, overrides, roots).items() if name != HYDRA}


def _search_path(own: Any, path: Path) -> list[Path]:
    """Return the existing folders of hydra's `searchpath`.

    Relative folders and packages lie in the folder from which the library starts: the working directory, or one that
    contains the file.
    """
    named = own.get("searchpath") if isinstance(own, Mapping) else None
    found = []
    for entry in named if isinstance(named, list) else ():
        kind, _, place = str(entry).rpartition("://")
        folder = place.replace(".", "/") if kind == "pkg" else place
        found += [around / folder for around in (Path.cwd(), *path.parents) if (around / folder).is_dir()][:1]
    return found


def _by_hydra(path: Path, overrides: Sequence[str], roots: Sequence[Path]) -> dict[str, Any]:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    found = [f"{HYDRA}.searchpath=[{','.join(f'file://{root}' for root in roots[1:])}]"] if len(roots) > 1 else []
    choices = _Choices(roots=roots)
    for override in (one.strip() for one in overrides if not _HYDRAS_OWN.match(one.strip())):
        if choices.takes(override) or override.startswith("~"):
            found.append(override)
        else:
            found.append(
                f"++{override.lstrip('+')}"
            )  # `++` takes a new key and an existing one: the importer reports unknown keys itself
    try:
        with initialize_config_dir(config_dir=str(path.parent), version_base=None):
            composed = compose(config_name=path.stem, overrides=found)
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=False)
    except (HydraException, OmegaConfBaseException, YAMLError, OSError, ValueError, RecursionError) as problem:
        expected = "what hydra composes to a configuration; import from a whole checkout"
        raise error(path, " ".join(str(problem).split()), expected) from problem
    return values


def _by_files(path: Path, overrides: Sequence[str], roots: Sequence[Path]) -> dict[str, Any]:
    choices = _Choices(roots=roots)
    of_recipe = [override.strip() for override in overrides if not _HYDRAS_OWN.match(override.strip())]
    of_values = [override for override in of_recipe if not choices.takes(override)]
    merged: dict[str, Any] = {}
    for package, values in _settled_parts(path, choices):
        merged = merge(merged, below(package, values))
    for key in (*choices.removed, *choices.named):
        if key not in choices.met:
            raise error(path, f"the group {key} behind the file, which is in no defaults", "a group that is, or +GROUP=NAME")
    return with_overrides(merged, of_values)


def _settled_parts(path: Path, choices: "_Choices") -> list[tuple[str, dict[str, Any]]]:
    """Return the tables of all files, read again until every `override` entry also counts for the files before it."""
    for _ in range(MOST_FILES):
        known = dict(choices.overridden)
        choices.made.clear()
        parts = [*_parts(path, "", "", choices), *_added_parts(path, choices)]
        if choices.overridden == known:
            return parts
    raise error(path, "entries `override` that change which files are read, without an end", "files that end somewhere")


@frozen(kw_only=True, eq=False)
class _Choices:
    """The name that each group takes, from arguments, `override` entries and `defaults`."""

    roots: Sequence[Path]
    named: dict[str, Any] = field(factory=dict)
    """Names by group, or group@package, from arguments GROUP=NAME; several in a list."""
    overridden: dict[str, str] = field(factory=dict)
    """Names by group from `override` entries of `defaults`; the outermost file wins."""
    added: list[tuple[str, str | None, Any]] = field(factory=list)
    removed: list[str] = field(factory=list)
    made: dict[str, str] = field(factory=dict)
    """Names by group that files have chosen so far; references read them."""
    met: set[str] = field(factory=set)

    def takes(self, override: str) -> bool:
        """Record an argument that chooses, adds or removes a group; False for any other."""
        if removal := _REMOVAL.fullmatch(override):
            (group, package), sign, name = removal.groups(), "~", ""
        elif match := _CHOICE.fullmatch(override):
            sign, group, package, name = match.groups()
        else:
            return False
        if not any((root / group).is_dir() for root in self.roots):
            return False
        names = value_of(name) if name.strip().startswith("[") else name.strip()
        if sign == "~":
            self.removed.append(_key(group, package))
        elif sign:
            self.added.append((group, package, names))
        else:
            self.named[_key(group, package)] = names
        return True

    def of(self, key: str, written: Any) -> Any:
        """Return the name that a group takes where its file has `written`; None where it takes none."""
        self.met.add(key)
        if key in self.removed:
            return None
        name = self.named.get(key, self.overridden.get(key, written))
        if isinstance(name, str):
            name = _REFERENCE.sub(lambda match: str(self._made(match[1], match[0])), name)
        return None if name == "null" else name

    def _made(self, key: str, written: str) -> str:
        return str(self.named.get(key) or self.overridden.get(key) or self.made.get(key, written))


def _key(group: str, package: str | None) -> str:
    """Return GROUP@PACKAGE, or GROUP alone where the package has the group's name."""
    return group if package is None or package == group.replace("/", ".") else f"{group}@{package}"


def _parts(
    path: Path, group: str, package: str, choices: _Choices, above: tuple[Path, ...] = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tables of a file and of its `defaults` in order, each with the dotted table that it goes to.

    `group` is the folder of the file below the roots.
    """
    path = path.resolve()
    if path in above or len(above) > MOST_FILES:
        raise error(path, "defaults that name each other in a circle", "files that end somewhere")
    values = read_yaml(path)
    written = values.pop(DEFAULTS, None) or []
    if not isinstance(written, list):
        raise error(path, f"defaults = {written!r}", "a list of groups")
    entries = [_entry(entry, path, group, package) for entry in written]
    for entry in entries:
        if entry.overrides:
            choices.overridden.setdefault(entry.key, entry.name)
    for entry in entries:
        if isinstance(entry.name, str) and not entry.overrides:
            choices.made.setdefault(entry.key, choices.of(entry.key, entry.name) if entry.is_group else entry.name)
    if not any(entry.name == SELF for entry in entries):
        entries.append(_Entry(name=SELF))
    for entry in entries:
        if entry.name == SELF:
            yield package, values
        elif not entry.overrides and not entry.group.startswith(HYDRA):
            name = choices.of(entry.key, entry.name) if entry.is_group else entry.name
            for one in name if isinstance(name, list) else [] if name is None else [name]:
                yield from _file_parts(entry, str(one), path, package, choices, (*above, path))


def _added_parts(path: Path, choices: _Choices) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tables that +GROUP=NAME adds after all others."""
    for group, package, name in choices.added:
        entry = _Entry(group=group, written=group, package=package, is_group=True)
        for one in name if isinstance(name, list) else [name]:
            yield from _file_parts(entry, str(one), path, "", choices, (path,))


@frozen(kw_only=True)
class _Entry:
    """One entry of `defaults`."""

    name: Any = ""
    group: str = ""
    """The folder of the file below the roots."""
    written: str = ""
    """The folder as the entry spells it, relative to its file."""
    package: str | None = None
    key: str = ""
    is_group: bool = False
    is_optional: bool = False
    overrides: bool = False


def _entry(entry: Any, path: Path, group: str, package: str) -> _Entry:
    if entry == SELF:
        return _Entry(name=SELF)
    if isinstance(entry, str):
        name, _, to = entry.partition("@")
        folder, _, name = name.rpartition("/")
        return _Entry(name=name, group=_folder(group, entry, folder), written=folder, package=to or None)
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((key, name),) = entry.items()
        *words, last = str(key).split() or [""]
        named, _, to = last.partition("@")
        folder = _folder(group, named, named)
        is_inner = bool(package) and re.fullmatch(r"\w[\w\-/]*", named) is not None
        absolute = _joined(package, to or named.replace("/", ".")) if to or is_inner else None
        overrides = "override" in words
        return _Entry(
            name=name,
            group=folder,
            written=named,
            package=to or None,
            key=_key(folder, to or None if overrides else absolute),
            is_group=True,
            is_optional="optional" in words,
            overrides=overrides,
        )
    raise error(path, f"{entry!r} in defaults", "a name, or one group with its name")


def _folder(group: str, written: str, folder: str) -> str:
    """Return the folder below the roots that a file of `group` names."""
    joined = folder if written.startswith("/") else posixpath.join(group, folder)
    return posixpath.normpath(joined).strip("/").removeprefix(".") if joined else ""


def _file_parts(
    entry: _Entry, name: str, path: Path, package: str, choices: _Choices, above: tuple[Path, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    files = [root / entry.group / f"{name}.yaml" for root in choices.roots]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        if entry.is_optional:
            return
        found = f"no such file, which defaults of {path.name} name"
        raise error(files[0], found, "the file of a group in defaults", "Import from a whole checkout")
    head = None if entry.package else _head(file)
    inner = _inner("" if head else package, entry.package or head, entry.written)
    yield from _parts(file, entry.group, inner, choices, above)


def _inner(package: str, named: str | None, group: str) -> str:
    """Return the dotted table of a file included by one of `package`: named by its entry or its head, else by its group.

    A head names an absolute table: `package` is then empty.
    """
    if named is None or named == "_group_":
        named = ".".join(part for part in group.split("/") if part not in ("", ".."))
    if named.startswith("_global_"):
        return named.removeprefix("_global_").removeprefix(".")
    return package if named == "_here_" else _joined(package, named)


def _head(file: Path) -> str | None:
    """Return the package in the comment `# @package` of a file; None for `_group_`, which is that without a comment."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    heads = (_PACKAGE.match(line) for line in lines if line.lstrip().startswith("#"))
    return next((head[1] for head in heads if head and head[1] != "_group_"), None)


def _joined(*packages: str) -> str:
    return ".".join(package for package in packages if package)

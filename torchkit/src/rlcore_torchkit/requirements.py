"""Requirements and capabilities of torch backends: versions of libraries, found without importing them."""

import importlib.util
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rlcore.installed import build_of
from rlcore.spi import capabilities
from rlcore.spi.errors import PluginError

UNTRIED_VARIABLE = "RLCORE_UNTRIED_VERSIONS"
"""Environment variable: "1" lets libraries of versions run that nothing was tried with."""


def supported_versions(distribution: str, library: str) -> SpecifierSet:
    """The versions of a library that a package of rlcore requires, itself or by an extra; its pyproject.toml says which."""
    for need in map(Requirement, metadata.requires(distribution) or ()):
        if need.name == library:
            return need.specifier
    raise PluginError(
        f"the metadata of {distribution} has no requirement of {library}. Reinstall it: "
        f"pip install --force-reinstall --no-deps {distribution}"
    )


def untried_version(library: str, found: Version, *supported: SpecifierSet, hint: str = "") -> str | None:
    """Refuse a version outside of all `supported`, with what installs another and how to try it; None for one within."""
    allowed = os.environ.get(UNTRIED_VARIABLE, "")
    if any(each.contains(found.base_version) for each in supported) or allowed == "1":
        return None
    hint = hint or f"pip install '{library}{supported[0]}'"
    return (
        f"{library} {found} is installed; expected {library}{' or '.join(map(str, supported))}: {hint}. "
        f"Nothing was tried with {library} {found.public}: docs/supported-versions.md says what to try. "
        f"{UNTRIED_VARIABLE}=1 runs it all the same"
    ) + ("" if allowed in ("", "0") else f"; found {UNTRIED_VARIABLE}={allowed!r}")


REQUIRED = {library: supported_versions("rlcore-torchkit", library) for library in ("torch", "transformers")}
"""Distribution to the versions that serve."""
FIRST_VERSIONS: dict[str, str] = {
    family: version
    for version, families in {
        "5.20": "bailing_hybrid beam kolibri1",
        "5.21": "flint",
        "5.23": "dots3_note_text inkling2_text internlm3 iquestcoder lfm3",
        "5.24": "apertus1p5_text dory exaone inkling2_loop_text lara_mini sarvam_mla sarvam_moe",
    }.items()
    for family in families.split()
}
"""The first transformers with a class, by model_type, where the oldest supported one lacks it."""
TRAINER_CAPABILITIES = capabilities.ANY_CHANNEL | {
    capabilities.IN_PROCESS,
    capabilities.REFERENCE_POLICY,
    capabilities.REFERENCE_MODEL,
    capabilities.REFERENCE_ALONE,
    capabilities.ENTROPY,
    capabilities.SAVE_HF,
    capabilities.METRIC_BOUNDS,
    capabilities.EXACT_LOGPROBS,
    capabilities.PREVIOUS_LOGPROBS,
    capabilities.STEP_LOGPROBS,
    capabilities.SCHEDULE_STEP,
    capabilities.VALUE_HEAD,
    capabilities.MULTI_RANK,
    capabilities.ROUTING_REPLAY,
    capabilities.SAMPLING_MASK_REPLAY,
    capabilities.RESIDENCY,
}
"""The capabilities of a trainer that is built on this package."""


def missing_requirement() -> str | None:
    """Name what keeps torch backends from running here, with the remedy, or None."""
    for name, supported in REQUIRED.items():
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install '{name}{supported}'"
        found = installed_version(name)
        if found is None:
            return f"{name} can be imported but has no metadata: install it anew with pip install --force-reinstall {name}"
        if reason := untried_version(name, found, supported):
            return reason
    return _unfit("torchvision") or _unfit("torchaudio")


def _unfit(name: str) -> str | None:
    """Name a torchvision or torchaudio that torch cannot load, and that breaks the import of transformers' models."""
    torch, found = installed_version("torch"), installed_version(name)
    if torch is None or found is None:
        return None
    needed = SpecifierSet()
    for line in metadata.requires(name) or ():
        if (requirement := Requirement(line)).name == "torch":
            needed &= requirement.specifier
    operator = " (operator torchvision::nms does not exist)" if name == "torchvision" else ""
    breaks = f"transformers' models cannot be imported beside it{operator}"
    remedy = f"pip uninstall {name}, which models of text do not need, or install the one of this torch"
    if not (needed.contains(torch, prereleases=True) or needed.contains(torch.base_version)):
        return f"{name} {found} needs torch{needed}; found torch {torch}: {breaks}. {remedy}"
    built, own = _build(name), _build("torch")
    if built.startswith("cu") and own and own[:4] != built[:4]:  # cu128 and cu126 are one CUDA
        return f"{name} {found} is built for {built}, torch {torch} for {own}: {breaks}. {remedy}"
    return None


def _build(distribution: str) -> str:
    try:
        return build_of(metadata.distribution(distribution))
    except metadata.PackageNotFoundError:
        return ""


def newer_transformers(config: Mapping[str, Any]) -> str:
    """Return the remedy for a model whose class the installed transformers lacks: the first version that has it, or the one
    that wrote its config.json; "" where neither is known to be newer."""
    if remedy := first_transformers(config):
        return remedy
    written, here = str(config.get("transformers_version")), installed_version("transformers")
    with suppress(InvalidVersion):
        version = Version(written).base_version
        if here is not None and Version(version) > here:
            supported = REQUIRED["transformers"]
            untried = "" if supported.contains(version) else f"; rlcore was tried with transformers{supported} alone"
            return f"transformers {written} wrote config.json and knows it: pip install 'transformers>={version}'{untried}"
    return ""


def first_transformers(config: Mapping[str, Any]) -> str:
    """Return the remedy that installs the first transformers with the class of a model; "" where the installed one is no older,
    or none is known."""
    first, here = FIRST_VERSIONS.get(str(config.get("model_type"))), installed_version("transformers")
    if first is None or here is None or Version(first) <= here:
        return ""
    end = "".join(f",{limit}" for limit in REQUIRED["transformers"] if limit.operator == "<")
    return f"transformers {first} is the first that knows it: pip install 'transformers>={first}{end}'"


def installed_version(distribution: str) -> Version | None:
    """The version of an installed distribution, by its metadata; None where there is none that can be read. Of one that is no
    version by PEP 440, such as 2.11.0-git, the leading numbers."""
    try:
        text = str(metadata.version(distribution))  # of damaged metadata None
    except (metadata.PackageNotFoundError, KeyError):
        return None
    try:
        return Version(text)
    except InvalidVersion:
        numbers = re.match(r"\d+(\.\d+)*", text)
        return None if numbers is None else Version(numbers.group())

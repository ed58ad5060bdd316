"""Requirements and capabilities of torch backends: versions of libraries, found without importing them."""

import importlib.util
import re
from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rlcore.spi import capabilities

REQUIRED = {"torch": ">=2.11", "transformers": ">=5.17,<5.20"}
"""Distribution to the versions that serve, as in this distribution's requirements."""
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
            return f"{name} is not installed: pip install {name}"
        found = installed_version(name)
        if found is None:
            return f"{name} can be imported but has no metadata: install it anew with pip install {name}"
        if not SpecifierSet(supported).contains(found.base_version):
            return f"{name} {found} is installed; expected {supported}: pip install '{name}{supported}'"
    return None


def installed_version(distribution: str) -> Version | None:
    """The version of an installed distribution, by its metadata; None where there is none that can be read. Of one that is no
    version by PEP 440, such as 2.11.0-git, the leading numbers."""
    try:
        text = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
    try:
        return Version(text)
    except InvalidVersion:
        numbers = re.match(r"\d+(\.\d+)*", text)
        return None if numbers is None else Version(numbers.group())

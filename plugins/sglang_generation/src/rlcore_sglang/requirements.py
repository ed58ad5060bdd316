"""Checks that an installed SGLang can run, from metadata alone."""

from packaging.specifiers import SpecifierSet

from rlcore.installed import is_installed
from rlcore_torchkit.requirements import installed_version, missing_requirement, supported_versions, untried_version

SUPPORTED = (SpecifierSet("==0.5.17"), supported_versions("rlcore-sglang", "sglang"))
"""The versions whose updates of weights were tried: the last for torch 2.11, and that of the extra `engine`."""
INSTALL = "pip install 'rlcore-sglang[engine]'"


def unavailable() -> str | None:
    """Name what keeps SGLang from running here, with the command that helps, or None."""
    version = installed_version("sglang")
    if version is None:
        return f"SGLang is not installed: {INSTALL}"
    if reason := untried_version("sglang", version, *SUPPORTED, hint=INSTALL):
        return reason
    if not is_installed("torchvision"):
        return (
            f"torchvision is not installed, which sglang {version} imports for text models too: pip install torchvision, "
            "the build that fits torch (CPUs: --index-url https://download.pytorch.org/whl/cpu)"
        )
    return missing_requirement()

"""Whether an SGLang is here that can run, found out from metadata alone."""

from packaging.specifiers import SpecifierSet

from rlcore.installed import is_installed
from rlcore_torchkit.requirements import installed_version, missing_requirement

SUPPORTED = SpecifierSet(">=0.5.23,<0.5.24")
"""The versions whose updates of weights were tried, as in the extra `engine`."""
INSTALL = "pip install 'rlcore-sglang[engine]'"


def unavailable() -> str | None:
    """Why SGLang cannot run here, with the command that helps, or None."""
    version = installed_version("sglang")
    if version is None:
        return f"SGLang is not installed: {INSTALL}"
    if not SUPPORTED.contains(version, prereleases=True):
        return f"sglang {version} is installed; expected sglang{SUPPORTED}: {INSTALL}"
    if not is_installed("torchvision"):
        return (
            f"torchvision is not installed, which sglang {version} imports for text models too: pip install torchvision, "
            "the build that fits torch (CPUs: --index-url https://download.pytorch.org/whl/cpu)"
        )
    return missing_requirement()

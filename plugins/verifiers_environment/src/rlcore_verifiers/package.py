"""Whether the package `verifiers`, and that of an environment, are there; neither is imported."""

from importlib import metadata

from packaging.specifiers import SpecifierSet

from rlcore.installed import is_installed
from rlcore.spi import CheckContext, Problem
from rlcore_verifiers.config import VerifiersConfig

SUPPORTED = SpecifierSet(">=0.2.1,<0.3")
"""Versions whose `load_environment` was tried; 0.4 has none."""
INSTALL = "pip install 'rlcore-verifiers[hub]'"


def unavailable() -> str | None:
    """Why no environment can be loaded here, with the remedy."""
    try:
        version = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        return f"verifiers is not installed: {INSTALL}"
    if not SUPPORTED.contains(version, prereleases=True):
        return f"found verifiers {version}; expected {SUPPORTED}: {INSTALL}"
    return None


def module_name(name: str) -> str:
    """The module that `verifiers` imports for an environment."""
    return name.rpartition("/")[2].replace("-", "_")


def check(_context: CheckContext | None, config: VerifiersConfig) -> list[Problem]:
    """Problems of `[environment.verifiers]`, without running anything of the environment."""
    if is_installed(module_name(config.name)):
        return []
    remedy = f"Install its package: prime env install {config.name}, or pip install of the folder that it lies in."
    found = f"{config.name!r}, for which there is no module {module_name(config.name)!r}"
    return [Problem(path="environment.verifiers.name", found=found, expected="an environment that is installed", remedy=remedy)]

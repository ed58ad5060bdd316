"""Checks that an installed Megatron-Core can run, from metadata alone: imports neither torch nor Megatron."""

import importlib.util
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.requirements import installed_version, supported_versions, untried_version
from rlcore_torchkit.requirements import missing_requirement as missing_torch

SUPPORTED = supported_versions("rlcore-megatron", "megatron-core")
NEEDS_NEWER_CUBLAS = SpecifierSet(">=2.13,<2.15")
"""TransformerEngine that cannot be imported with the cuBLAS of torch 2.11, and takes the import of Megatron with it."""
NEEDS_NEWER_CUDNN = SpecifierSet(">=2.17,<2.18")
"""TransformerEngine whose attention has no backward pass with the cuDNN of torch 2.11."""
OLD_LIBRARIES = SpecifierSet("<2.12")
"""Versions of torch that those two do not go with."""
PROVEN = "2.12.0"
"""The TransformerEngine to install instead."""
_ENGINE_DISTRIBUTIONS = ("transformer-engine", "transformer-engine-torch")


def missing_requirement() -> str | None:
    """Name what keeps Megatron from running here at all, with the command that helps, or None."""
    return missing_torch() or _missing_megatron() or _broken_import()


def transformer_engine_version() -> Version | None:
    """The version of the TransformerEngine that Megatron would import; None where there is none."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None
    return next((found for name in _ENGINE_DISTRIBUTIONS if (found := installed_version(name)) is not None), Version("0"))


def uses_transformer_engine(config: MegatronConfig, device: Literal["cpu", "cuda"], dtype: str) -> bool:
    """Return whether the layers are TransformerEngine's: as the section says, else where it is installed and there is a GPU.

    But not in float32 unless the section says so: it rounds products to TF32. And not where vLLM's kernels compute.
    """
    if config.transformer_engine is not None or config.batch_invariant:
        return bool(config.transformer_engine)
    return device == "cuda" and (dtype != "float32" or config.fp8) and transformer_engine_version() is not None


def missing_delta_kernels() -> str | None:
    """Name the package that gated delta nets need on a GPU, and what installs it; None where it is there."""
    if importlib.util.find_spec("fla") is not None:
        return None
    return "flash-linear-attention is not installed, which computes gated delta nets: pip install flash-linear-attention"


def broken_attention() -> str | None:
    """Name what keeps the installed TransformerEngine from training, and what to install, where Megatron runs without it; or
    None."""
    return _misfit(NEEDS_NEWER_CUDNN, "nvidia-cudnn", "its attention needs a newer cuDNN for the backward pass")


def _missing_megatron() -> str | None:
    found = installed_version("megatron-core")
    if found is None:
        return f"megatron-core is not installed: pip install 'megatron-core{SUPPORTED}'"
    if reason := untried_version("megatron-core", found, SUPPORTED):
        return reason
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        again = f"pip install --force-reinstall --no-deps megatron-core=={found}"
        return f"megatron-core {found} is installed, but its package megatron.core is not there: {again}"
    return None


def _broken_import() -> str | None:
    return _misfit(NEEDS_NEWER_CUBLAS, "nvidia-cublas", "it needs a newer cublasLt and breaks the import of Megatron")


def _misfit(versions: SpecifierSet, library: str, reason: str) -> str | None:
    """A TransformerEngine among `versions` beside an old torch whose own build of `library` is installed."""
    engine, torch = transformer_engine_version(), installed_version("torch")
    if engine is None or torch is None or not versions.contains(engine, prereleases=True):
        return None
    if not OLD_LIBRARIES.contains(torch.base_version) or _newer_than_torchs(library):
        return None
    return (
        f"TransformerEngine {engine} does not go with torch {torch}: {reason}. "
        f"pip install --no-build-isolation 'transformer_engine[pytorch]=={PROVEN}'"
    )


def _newer_than_torchs(library: str) -> bool:
    """Return whether another version of a CUDA library is installed than the one that torch asks for."""
    for line in metadata.requires("torch") or ():
        need = Requirement(line)
        if need.name.startswith(library):
            found = installed_version(need.name)
            return found is not None and not need.specifier.contains(found)
    return False

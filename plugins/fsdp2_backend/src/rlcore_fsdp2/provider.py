"""The entry point: describes the trainer without importing torch."""

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from rlcore.spi import Provider, capabilities
from rlcore_fsdp2.config import Fsdp2Config

REQUIRED = {"torch": ((2, 11), None), "transformers": ((5, 16), (5, 20))}
"""Distribution to (first version that serves, first that does not), as in pyproject.toml."""


def _release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def unavailable() -> str | None:
    """Why the trainer cannot run here, or None."""
    for name, (first, beyond) in REQUIRED.items():
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install {name}"
        try:
            found = version(name)
        except PackageNotFoundError:
            return f"{name} can be imported but has no metadata: install it anew with pip install {name}"
        expected = f">={first[0]}.{first[1]}" + (f",<{beyond[0]}.{beyond[1]}" if beyond else "")
        if _release(found) < first or (beyond is not None and _release(found) >= beyond):
            return f"{name} {found} is installed; expected {expected}: pip install '{name}{expected}'"
    return None


PROVIDER = Provider(
    name="fsdp2",
    spi=(1, 0),
    priority=50,
    capabilities={
        capabilities.REFERENCE_POLICY,
        capabilities.ENTROPY,
        capabilities.SAVE_HF,
        capabilities.RESIDENCY,
        capabilities.REFIT_IN_PROCESS,
    },
    config=Fsdp2Config,
    unavailable=unavailable,
    backend="rlcore_fsdp2.backend:Fsdp2Backend",
    check="rlcore_fsdp2.check:check",
)

"""The entry point: describes the generator without importing torch."""

import importlib.util

from rlcore.spi import Provider, capabilities
from rlcore_transformers.config import TransformersConfig


def unavailable() -> str | None:
    """Why the generator cannot run here, or None."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed: pip install {name}"
    return None


PROVIDER = Provider(
    name="transformers",
    spi=(1, 0),
    priority=20,
    capabilities={
        capabilities.TOP_K,
        capabilities.TOP_P,
        capabilities.STOP_STRINGS,
        capabilities.PER_SAMPLE_SEEDS,
        capabilities.EXACT_LOGPROBS,
        capabilities.RESIDENCY,
        capabilities.REFIT_IN_PROCESS,
    },
    config=TransformersConfig,
    unavailable=unavailable,
    backend="rlcore_transformers.backend:TransformersBackend",
    check="rlcore_transformers.check:check",
)
"""What the entry point names."""

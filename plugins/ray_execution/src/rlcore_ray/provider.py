"""The execution `ray`, described without importing Ray."""

from importlib.util import find_spec

from rlcore.spi import Provider, capabilities
from rlcore_ray.config import RayConfig


def unavailable() -> str | None:
    """Return a reason where Ray is not installed."""
    return None if find_spec("ray") is not None else "the package ray is not installed. Run: pip install 'rlcore[ray]'"


RAY = Provider(
    name="ray",
    spi=(2, 0),
    config=RayConfig,
    backend="rlcore_ray.execution:on_ray",
    priority=20,
    capabilities={capabilities.MULTI_RANK},
    unavailable=unavailable,
    check="rlcore_ray.config:check",
)

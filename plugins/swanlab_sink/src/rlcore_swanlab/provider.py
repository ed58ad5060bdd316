"""The entry point: describes the sink without importing the tracker."""

from rlcore.installed import is_installed
from rlcore.spi import Provider
from rlcore_swanlab.config import SwanLabConfig


def unavailable() -> str | None:
    """Why it cannot be used: the tracker is no dependency, since it narrows versions of others."""
    return None if is_installed("swanlab") else "the package swanlab is not installed: pip install 'rlcore-swanlab[tracker]'"


PROVIDER = Provider(
    name="swanlab",
    spi=(2, 0),
    config=SwanLabConfig,
    backend="rlcore_swanlab.sink:SwanLabSink",
    unavailable=unavailable,
)
"""The provider for the entry point."""

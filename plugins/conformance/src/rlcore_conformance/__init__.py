"""The conformance kit: what every trainer, generator, algorithm and environment has to pass, and every other kind of plugin.

    from rlcore_conformance import TrainerConformance

    class TestMine(TrainerConformance):
        @pytest.fixture
        def provider(self): return PROVIDER

A provider's tests are one class and one fixture; everything else has a default and can be overridden by a fixture of the
same name (see `TrainerConformance` and its like). A declared capability must pass its checks; those of an
undeclared one are skipped.
"""

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore_conformance.algorithm import AlgorithmConformance
    from rlcore_conformance.channel import ChannelConformance
    from rlcore_conformance.collector import CollectorConformance
    from rlcore_conformance.environment import EnvironmentConformance
    from rlcore_conformance.execution import ExecutionConformance
    from rlcore_conformance.generator import GeneratorConformance
    from rlcore_conformance.loop_observer import LoopObserverConformance
    from rlcore_conformance.renderer import RendererConformance
    from rlcore_conformance.sink import SinkConformance
    from rlcore_conformance.tokenizer import TokenizerConformance
    from rlcore_conformance.trainer import TrainerConformance

__all__ = [
    "AlgorithmConformance",
    "ChannelConformance",
    "CollectorConformance",
    "EnvironmentConformance",
    "ExecutionConformance",
    "GeneratorConformance",
    "LoopObserverConformance",
    "RendererConformance",
    "SinkConformance",
    "TokenizerConformance",
    "TrainerConformance",
]

_CHECKS = (
    *("algorithms", "channel", "collector", "environment", "environments", "execution", "fake_runs", "generators"),
    *("loop_observer", "references", "renderer", "sink", "tokenizer", "trainers"),
)


def _show_values_of_asserts() -> None:
    """Have pytest rewrite the checks' asserts, so that one that fails shows its values as in a test file."""
    import pytest

    pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _CHECKS))


if "pytest" in sys.modules:  # `rlcore --help` imports this package too, and needs no pytest
    _show_values_of_asserts()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _show_values_of_asserts()
    return getattr(import_module(f"{__name__}.{_module_of(name)}"), name)


def _module_of(name: str) -> str:
    """Return the module of a class: "loop_observer" of LoopObserverConformance."""
    return re.sub("(?<!^)(?=[A-Z])", "_", name.removesuffix("Conformance")).lower()

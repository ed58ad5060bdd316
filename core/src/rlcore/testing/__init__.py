"""What tests of plugins use: fakes of every role, small model directories, and the conformance kit.

from rlcore.testing import TrainerConformance

class TestMine(TrainerConformance):
    @pytest.fixture
    def provider(self): return PROVIDER
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.testing.conformance.algorithm import AlgorithmConformance
    from rlcore.testing.conformance.environment import EnvironmentConformance
    from rlcore.testing.conformance.generator import GeneratorConformance
    from rlcore.testing.conformance.sink import SinkConformance
    from rlcore.testing.conformance.trainer import TrainerConformance

__all__ = ["AlgorithmConformance", "EnvironmentConformance", "GeneratorConformance", "SinkConformance", "TrainerConformance"]


_MODULES = {
    "AlgorithmConformance": "algorithm",
    "EnvironmentConformance": "environment",
    "GeneratorConformance": "generator",
    "SinkConformance": "sink",
    "TrainerConformance": "trainer",
}


def __getattr__(name: str) -> Any:
    # The kit needs pytest, which whoever only uses the fakes need not have.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rlcore.testing.conformance.{_MODULES[name]}"), name)

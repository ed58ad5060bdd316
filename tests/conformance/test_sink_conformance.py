"""The core's own sinks pass the conformance kit."""

import pytest

from rlcore.run.report.plots import CURVE
from rlcore.run.report.tensorboard import TENSORBOARD
from rlcore_conformance import SinkConformance


class TestCurve(SinkConformance):
    @pytest.fixture
    def provider(self):
        return CURVE


class TestTensorboard(SinkConformance):
    @pytest.fixture
    def provider(self):
        return TENSORBOARD

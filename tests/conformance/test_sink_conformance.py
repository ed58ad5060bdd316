"""The core's own sinks pass the conformance kit."""

import pytest

from rlcore_conformance import SinkConformance
from rlcore_report.plots import CURVE
from rlcore_report.tensorboard import TENSORBOARD


class TestCurve(SinkConformance):
    @pytest.fixture
    def provider(self):
        return CURVE


class TestTensorboard(SinkConformance):
    @pytest.fixture
    def provider(self):
        return TENSORBOARD

"""The stranger's execution and channel pass the conformance kit."""

import sys
from pathlib import Path

import pytest

from rlcore_conformance import ChannelConformance, ExecutionConformance

sys.path.insert(0, str(Path(__file__).parent / "four_parts" / "src"))

from four_parts.provider import SPOOL, THREAD


class TestSpool(ChannelConformance):
    @pytest.fixture
    def provider(self):
        return SPOOL


class TestThread(ExecutionConformance):
    @pytest.fixture
    def provider(self):
        return THREAD

"""The channels of this repository pass the conformance kit."""

import pytest

from rlcore.spi import find_channel
from rlcore_conformance import ChannelConformance


class TestDirectory(ChannelConformance):
    @pytest.fixture
    def provider(self):
        return find_channel("directory")


class TestSharedMemory(ChannelConformance):
    @pytest.fixture
    def provider(self):
        return find_channel("shared_memory")

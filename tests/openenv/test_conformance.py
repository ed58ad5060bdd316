"""The kit's checks of rows; episodes run by themselves."""

import pytest

from rlcore.spi import Provider
from rlcore_conformance import EnvironmentConformance
from rlcore_openenv.config import OpenEnvConfig
from rlcore_openenv.provider import OPENENV


class TestOpenEnv(EnvironmentConformance):
    @pytest.fixture
    def provider(self) -> Provider:
        return OPENENV

    @pytest.fixture
    def config(self) -> OpenEnvConfig:
        return OpenEnvConfig(urls=("http://localhost:8000",), num_train=10, num_evaluation=5)

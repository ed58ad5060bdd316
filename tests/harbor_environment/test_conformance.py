"""The kit's checks of rows; episodes run by themselves."""

from pathlib import Path

import pytest

from rlcore.spi import Provider
from rlcore_conformance import EnvironmentConformance
from rlcore_harbor.config import HarborConfig
from rlcore_harbor.provider import HARBOR

from .trials import write_task


class TestHarbor(EnvironmentConformance):
    @pytest.fixture
    def provider(self) -> Provider:
        return HARBOR

    @pytest.fixture
    def config(self, tmp_path: Path) -> HarborConfig:
        train, held_out = tmp_path / "train", tmp_path / "held-out"
        for folder in (train, held_out):
            for number in range(3):
                write_task(folder / f"task-{number}")
        return HarborConfig(tasks=str(train), evaluation_tasks=str(held_out))

"""The kit's checks of rows; episodes run by themselves."""

import json
from pathlib import Path

import pytest

from rlcore.spi import Provider
from rlcore.testing import EnvironmentConformance
from rlcore_nemo_gym.config import NemoGymConfig
from rlcore_nemo_gym.provider import NEMO_GYM

from .gym_servers import row


class TestNemoGym(EnvironmentConformance):
    @pytest.fixture
    def provider(self) -> Provider:
        return NEMO_GYM

    @pytest.fixture
    def config(self, tmp_path: Path) -> NemoGymConfig:
        files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "evaluation")}
        for name, file in files.items():
            file.write_text("".join(json.dumps(row(f"{name} {number}")) + "\n" for number in range(5)))
        return NemoGymConfig(train_files=(str(files["train"]),), evaluation_files=(str(files["evaluation"]),))

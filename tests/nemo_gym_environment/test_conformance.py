"""The kit's checks of rows; episodes run by themselves."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from attrs import evolve

from rlcore.spi import EnvironmentContext, Provider
from rlcore_conformance import EnvironmentConformance
from rlcore_nemo_gym.config import NemoGymConfig
from rlcore_nemo_gym.environment import NemoGymBackend
from rlcore_nemo_gym.provider import NEMO_GYM

from .gym_servers import free_port, row


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

    @pytest.fixture
    def open_environment(self, config: NemoGymConfig) -> Iterator[Callable[[], NemoGymBackend]]:
        """Two at once need a port each."""
        with ExitStack() as stack:

            def build() -> NemoGymBackend:
                own = evolve(config, policy_port=free_port())
                return stack.enter_context(closing(NemoGymBackend(EnvironmentContext(seed=0), own)))

            yield build

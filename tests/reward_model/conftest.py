"""A tiny reward model with random weights."""

from pathlib import Path

import pytest

from rlcore_torchkit.testing.models import make_model


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("reward") / "model", "llama", head="value", max_length=64)

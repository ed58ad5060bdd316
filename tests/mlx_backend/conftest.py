"""Model directories, and what trainers and generators of MLX are built with."""

import sys
from pathlib import Path

import pytest

from rlcore_mlx.provider import TRAINER
from rlcore_torchkit.testing.models import make_model

sys.path.insert(0, str(Path(__file__).parent))  # for mlx_support

if TRAINER.unavailable() is not None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    """A function (architecture, tied) -> directory; each is made once."""
    made = {}

    def get(architecture="qwen3", tied=True):
        key = (architecture, tied)
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp("model") / architecture, architecture, tied=tied)
        return made[key]

    return get

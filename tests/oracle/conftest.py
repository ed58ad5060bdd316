"""Runs as a user starts them, with observers installed: one writes down what trainers are asked to do."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli
from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session
from rlcore_torchkit.testing.models import make_model

from .cases import ALPHABET, MAX_LENGTH, RECIPE, Case
from .recorded import RecordedRun

Run = Callable[[Case, Path], RecordedRun]
SITE = Path(__file__).parent / "site"
ENTRY_POINTS = """
[rlcore.global_observers]
recorder = oracle_recorder:OBSERVER
[rlcore.observers]
patience = oracle_patience:OBSERVER
[rlcore.environments]
turns = oracle_turns:PROVIDER
"""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Observers and an environment, as a distribution that this process and the ranks that it starts can find."""
    folder = tmp_path_factory.mktemp("site")
    information = folder / "oracle_recorder-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: oracle-recorder\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    added = [str(folder), str(SITE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*added, *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("NO_COLOR", "1")
        patch.setattr(sys, "path", [*added, *sys.path])
        yield


@pytest.fixture(scope="module")
def local_ray(recorder: None) -> Iterator[None]:
    """One Ray for all runs in several processes."""
    with ray_session(RayConfig(gpus_per_node=2, object_store_mib=100), "cpu", None):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; its tokens are the characters of sums."""
    return make_model(tmp_path_factory.mktemp("oracle") / "model", "qwen3", seed=7, alphabet=ALPHABET, max_length=MAX_LENGTH)


@pytest.fixture
def run(recorder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Train a model in a case by the command line, in this process and its ranks', and read what it left behind."""
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "oracle.toml"

    def train(case: Case, model: Path) -> RecordedRun:
        recipe.write_text(RECIPE.format(model=model))
        result = CliRunner().invoke(cli, ["train", str(recipe), *case.overrides])
        assert result.exit_code == 0, f"{result.stdout}{result.stderr}"
        return RecordedRun.read(tmp_path / "runs" / case.name, tmp_path / "train-steps")

    return train

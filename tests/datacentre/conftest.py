"""Data centres of a few hosts, which tests of a module share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore_torchkit.testing.models import make_model

from ..system.system_support import DIGITS, Workplace
from .hosts import DataCentre, data_centre, unavailable
from .ray_cluster import start_ray
from .runs import SMALL

NUM_HOSTS = 2


@pytest.fixture(scope="session", autouse=True)
def _machine_holds_a_data_centre() -> None:
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all hosts share, with a model and a recipe."""
    folder = tmp_path_factory.mktemp("shared")
    Workplace.make(folder, make_model(folder / "model", "qwen3", alphabet=DIGITS, max_length=64))
    return folder


@pytest.fixture(scope="module")
def centre(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataCentre]:
    """Two hosts."""
    with data_centre(tmp_path_factory.mktemp("hosts"), shared, NUM_HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def with_ray(centre: DataCentre) -> DataCentre:
    """Two hosts of one Ray cluster."""
    start_ray(centre)
    return centre


@pytest.fixture(scope="module")
def alone(shared: Path) -> Path:
    """The same training in one process, on this machine."""
    return Workplace(shared).train(str(shared / "grpo.toml"), *SMALL, "run.name=alone", f"run.directory={shared / 'runs'}")

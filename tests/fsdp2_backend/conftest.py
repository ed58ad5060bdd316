"""Model directories and backends of the FSDP2 trainer's tests."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # fsdp2_support is imported here, by loss paths and by spawned workers

from fsdp2_support import make_backend

from rlcore.spi import CloseRequest
from rlcore_torchkit.testing.models import make_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function (architecture, tied) -> directory; each is made once."""
    made: dict[tuple[str, bool], Path] = {}

    def get(architecture: str = "qwen3", tied: bool = True) -> Path:
        key = (architecture, tied)
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp("model") / architecture, architecture, tied=tied)
        return made[key]

    return get


@pytest.fixture
def backend(model_directory) -> Iterator[Callable[..., object]]:
    """A function (directory or None, **options of make_backend) -> Fsdp2Backend; all are closed at the end."""
    made = []

    def make(directory: Path | None = None, **options: object) -> object:
        made.append(make_backend(directory or model_directory(), **options))
        return made[-1]

    yield make
    for one in made:
        one.close(CloseRequest())

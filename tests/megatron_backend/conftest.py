"""What the Megatron trainer's tests import: their helpers, and the reference that the other trainer is compared with."""

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from rlcore_megatron.checkpoints.cache_directory import HUB, OWN
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.setup import requirements
from rlcore_torchkit.requirements import UNTRIED_VARIABLE
from rlcore_torchkit.testing.models import make_model

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "fsdp2_backend"):  # imported here, by loss paths and by spawned workers
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """A function (versions by distribution, None for one that is absent, what torch requires) that makes it so."""
    real_version, real_requires, real_spec = metadata.version, metadata.requires, requirements.importlib.util.find_spec

    def pretend(versions: dict[str, str | None], torch_requires: tuple[str, ...] | None = None) -> None:
        def version(name: str) -> str:
            if name not in versions:
                return real_version(name)
            if versions[name] is None:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        def find_spec(name: str, package: str | None = None) -> object:
            has_engine = any(versions.get(key) for key in ("transformer-engine", "transformer-engine-torch"))
            return object() if name == "transformer_engine" and has_engine else real_spec(name, package)

        def requires(name: str) -> list[str] | None:
            return list(torch_requires) if name == "torch" and torch_requires is not None else real_requires(name)

        monkeypatch.delenv(UNTRIED_VARIABLE, raising=False)
        monkeypatch.setattr(requirements.metadata, "version", version)
        monkeypatch.setattr(requirements.metadata, "requires", requires)
        monkeypatch.setattr(requirements.importlib.util, "find_spec", find_spec)

    return pretend


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a cache."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(OWN, raising=False)
    monkeypatch.delenv(HUB, raising=False)
    return tmp_path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture of experts."""
    return make_model(tmp_path_factory.mktemp("experts") / "model", "qwen3_moe", hidden_size=16)


@pytest.fixture
def model(directory: Path) -> Iterator[Any]:
    """It as Megatron builds it on one rank, `Opened`, without weights."""
    from megatron_weights_cases import opened

    with opened(directory, ParallelLayout()) as model:
        yield model

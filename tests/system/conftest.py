"""Whole runs as a user starts them: the command line, the installed plugins, small models."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore_ray.config import RayConfig
from rlcore_ray.session import ray_session
from rlcore_torchkit.testing.models import make_model

from .system_support import DIGITS, SITE_MODULES, Site, Workplace  # type: ignore[import-not-found]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose characters are digits and operators."""
    return make_model(tmp_path_factory.mktemp("digits") / "model", "qwen3", alphabet=DIGITS, max_length=64)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with other shapes."""
    folder = tmp_path_factory.mktemp("other")
    return make_model(folder / "model", "qwen2", alphabet=DIGITS, max_length=64, hidden_size=16, num_layers=1)


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """One Ray for the runs of a module, of two ranks of a CPU and, in some, a generator apart."""
    with ray_session(RayConfig(gpus_per_node=3, object_store_mib=100), "cpu", None):
        yield


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from outside decides what a run does, and nothing is looked up on the Hub."""
    for name in ("RLCORE_DISABLE_PLUGINS", "RLCORE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def workplace(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A folder with recipes, and the current one."""
    monkeypatch.chdir(tmp_path)
    return Workplace.make(tmp_path, model)


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A folder on sys.path to install distributions into."""
    folder = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(folder)
    yield Site(folder)
    for name in SITE_MODULES:
        sys.modules.pop(name, None)

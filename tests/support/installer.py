"""Fake distributions on a path of their own."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from rlcore.run.data.text import renderer, tokenizers
from rlcore.spi.provider import load_descriptions

LOOKED_UP = (load_descriptions, renderer, tokenizers)
"""Functions that look for installed packages once for a process."""
OWN_GROUPS = ("rlcore.commands", "rlcore.collectors")
PROVIDER_SOURCE = """
from attrs import frozen
from rlcore.spi import Provider

@frozen(kw_only=True)
class Config:
    size: int = 1
    \"\"\"A size.\"\"\"

FIELDS = {{"name": {name!r}, "spi": (2, 0), "config": Config, "backend": "rlcore.testing.fakes.trainer:FakeTrainer"}}
PROVIDER = Provider(**{{**FIELDS, **dict({options})}})
"""


class Installer:
    """Writes distributions with entry points, as an installer would, into a folder that is on sys.path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def add(
        self,
        distribution: str,
        entry_points: Mapping[str, Mapping[str, str]],
        version: str = "1.0",
        requires: Sequence[str] = (),
        **modules: str,
    ) -> None:
        information = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        information.mkdir()
        fields = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        fields += [f"Requires-Dist: {requirement}" for requirement in requires]
        information.joinpath("METADATA").write_text("\n".join(fields) + "\n")
        lines = []
        for group, points in entry_points.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
        information.joinpath("entry_points.txt").write_text("\n".join(lines))
        for name, source in modules.items():
            (self.folder / f"{name}.py").write_text(source)
            self.modules.append(name)
        importlib.invalidate_caches()

    def trainer(self, name: str, distribution: str = "", version: str = "1.0", calls_itself: str = "", **options: Any) -> None:
        """A distribution with one good trainer; `options` replace fields of its provider."""
        distribution = distribution or f"acme-{name}"
        module = f"{distribution}_{name}_provider".replace("-", "_")
        shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
        source = PROVIDER_SOURCE.format(name=calls_itself or name, options=shown)
        self.add(distribution, {"rlcore.trainers": {name: f"{module}:PROVIDER"}}, version, **{module: source})


class _ModulesOf:
    """Finds modules, but no distributions, on a path."""

    def __init__(self, path: list[str]) -> None:
        self.path = path

    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, path or self.path, target)


def add_own(installer: Installer) -> None:
    """Install the commands and collectors of rlcore's own distributions, with nothing else of these."""
    found = [point for group in OWN_GROUPS for point in metadata.entry_points(group=group)]
    for dist in {point.dist.name: point.dist for point in found}.values():
        groups = {
            group: {point.name: point.value for point in found if point.dist.name == dist.name and point.group == group}
            for group in OWN_GROUPS
        }
        installer.add(dist.name, groups, dist.version)


@pytest.fixture
def installer(tmp_path, monkeypatch) -> Installer:
    """Installs into a fresh environment, in which the really installed distributions show commands and collectors alone."""
    folder = tmp_path / "site"
    folder.mkdir()
    made = Installer(folder)
    add_own(made)
    original = list(sys.path)
    monkeypatch.setattr(sys, "path", [str(folder), *(path for path in original if "-packages" not in path)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, _ModulesOf(original)])
    monkeypatch.delenv("RLCORE_DISABLE_PLUGINS", raising=False)
    yield made
    for name in made.modules:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    for function in LOOKED_UP:
        function.cache_clear()

"""Environments that are made of metadata alone."""

import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from rlcore_doctor.packages import Installed, installed

Install = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of all installed distributions."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    original = metadata.distributions
    monkeypatch.setattr(metadata, "distributions", lambda: original(path=[str(folder)]))
    return folder


@pytest.fixture
def install(site: Path) -> Install:
    """Return a function that installs the metadata of a distribution and returns its folder."""

    def add(
        name: str,
        version: str = "1.0",
        *requires: str,
        python: str = "",
        points: str = "",
        tag: str = "",
        files: Sequence[str] = (),
    ) -> Path:
        folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        lines += [f"Requires-Dist: {line}" for line in requires] + ([f"Requires-Python: {python}"] if python else [])
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        (folder / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n" if tag else "")
        if points:
            (folder / "entry_points.txt").write_text(points)
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        return folder

    return add


@pytest.fixture
def found(site: Path) -> Callable[[], Installed]:
    """Return the function that reads what is installed."""
    return lambda: installed()[0]


RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"

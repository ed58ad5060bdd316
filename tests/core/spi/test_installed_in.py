"""Descriptions that are installed: a package that is broken, disabled or of another interface hides no other one's."""

from pathlib import Path

import pytest

from rlcore.spi.channels import CHANNEL_GROUP, ChannelProvider
from rlcore.spi.provider import installed_in

MODULE = """
from rlcore.spi import ChannelProvider

def channel(name, spi=(2, 0)):
    return ChannelProvider(name=name, spi=spi, cost=1, devices={{"cpu"}}, reach="process", sender="a:B", receiver="a:C")

GOOD = channel("{name}_good")
NEWER = channel("newer", spi=(2, 99))
OTHER = channel("another")
"""
POINTS = """[rlcore.channels]
{name}_good = {name}_channels:GOOD
newer = {name}_channels:NEWER
called = {name}_channels:OTHER
gone = {name}_nowhere:GONE
"""


def install(folder: Path, name: str, points: str) -> None:
    """Put a distribution into a folder of sys.path."""
    (folder / f"{name}_channels.py").write_text(MODULE.format(name=name))
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(points)


@pytest.mark.parametrize(
    ("disabled", "left"),
    [("", {"one_good", "two_good"}), ("one_good", {"two_good"}), ("channel:one_good", {"two_good"}), ("two", {"one_good"})],
)
def test_only_what_fits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disabled: str, left: set[str]) -> None:
    for name in ("one", "two"):
        install(tmp_path, name, POINTS.format(name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", disabled)
    found = installed_in(CHANNEL_GROUP, ChannelProvider)
    assert {name for name in found if name.endswith("_good") or name in ("newer", "called", "gone")} == left


def test_a_malformed_file_hides_no_other_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "three", POINTS.format(name="three"))
    install(tmp_path, "broken", "[rlcore.channels]\nno equals sign\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "three_good" in installed_in(CHANNEL_GROUP, ChannelProvider)


def test_an_import_that_takes_too_long_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcore.time_limit.load_seconds", lambda: 0.2)
    install(tmp_path, "four", POINTS.format(name="four"))
    install(tmp_path, "late", "[rlcore.channels]\nlate_good = late_sleeps:GOOD\n")
    (tmp_path / "late_sleeps.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = installed_in(CHANNEL_GROUP, ChannelProvider)
    assert "four_good" in found
    assert "late_good" not in found

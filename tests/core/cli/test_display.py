"""A run is shown by the installed display, or by plain lines."""

from pathlib import Path

import pytest

from rlcore.cli.display import open_display
from rlcore.cli.errors import RUN_DIRECTORY
from rlcore.run.report.plain_progress import PlainProgress
from rlcore.spi import PluginError
from rlcore.spi.provider import DISPLAY_GROUP

from .shown_run import drive  # type: ignore[import-not-found]

OWN = """
from contextlib import AbstractContextManager
from rlcore.run.report.progress import Progress

class Shown(Progress, AbstractContextManager):
    def __init__(self, mode):
        print("made for", mode)
    def __enter__(self):
        print("entered")
    def __exit__(self, *error):
        print("left")
"""


@pytest.mark.parametrize("mode", ["auto", "plain"])
def test_plain_lines_without_a_display(installer, capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: str) -> None:
    meta: dict[str, object] = {}
    with open_display(mode, meta) as progress:
        assert isinstance(progress, PlainProgress)
        drive(progress, tmp_path)
    assert meta == {RUN_DIRECTORY: tmp_path}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run directory {tmp_path}; steps 1 to 3"
    assert lines[1] == "step 0/3  pass@1 0.250"
    assert lines[2] == ("step 1/3  reward 0.333  length 7.2  2.00 s (generation 1.25, train 0.50, other 0.25)  1,234 tokens/s")
    assert lines[5] == "warning: step 3 has nothing to learn from"
    assert lines[6] == f"run directory: {tmp_path}. No report of it is shown. Run: pip install rlcore-report"


def test_a_live_display_that_is_not_installed_is_refused(installer) -> None:
    with pytest.raises(PluginError, match="Run: pip install rlcore-report"), open_display("live", {}):
        pass


@pytest.mark.parametrize("source", ["def Shown(mode):\n    pass\n", "def Shown(mode):\n    return {}[mode]\n"])
def test_a_display_that_is_none_is_named(installer, source: str) -> None:
    installer.add("acme-shown", {DISPLAY_GROUP: {"acme": "acme_shown:Shown"}}, acme_shown=source)
    with pytest.raises((PluginError, KeyError)) as raised, open_display("auto", {}):
        pass
    assert "acme-shown" in " ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


def test_the_installed_display_is_open_while_the_run_goes_on(installer, capsys: pytest.CaptureFixture[str]) -> None:
    installer.add("acme-shown", {DISPLAY_GROUP: {"acme": "acme_shown:Shown"}}, acme_shown=OWN)
    with open_display("live", {}):
        print("runs")
    assert capsys.readouterr().out.split("\n") == ["made for live", "entered", "runs", "left", ""]


def test_silence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    meta: dict[str, object] = {}
    with open_display("silent", meta) as progress:
        drive(progress, tmp_path)
    assert capsys.readouterr().out == ""
    assert meta == {RUN_DIRECTORY: tmp_path}

"""The demos end with an error as the command line does."""

import runpy
import sys
from pathlib import Path

import pytest

from rlcore.spi import ModelError, Problem

DEMO = Path(__file__).parents[2] / "demo"


@pytest.mark.parametrize("demo", ["run.py", "calculator.py"])
def test_an_error_is_printed_with_its_notes(tmp_path: Path, monkeypatch, capsys, demo: str) -> None:
    error = ModelError([Problem(path="model.path", found="nothing", expected="a model")])
    error.add_note("one note")
    error.add_note("another")

    def refuse(*_, **__):
        raise error

    monkeypatch.syspath_prepend(str(DEMO))
    monkeypatch.setattr("rlcore_torchkit.testing.models.make_model", refuse)
    monkeypatch.setattr(sys, "argv", [demo, f"--directory={tmp_path}"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(DEMO / demo), run_name="__main__")
    assert ended.value.code == error.exit_code
    assert capsys.readouterr().err == f"error: {error}\n  one note\n  another\n"

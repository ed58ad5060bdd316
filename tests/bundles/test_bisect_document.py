"""The program of docs/bisect.md collapses as the page says, and the command names what brings it."""

import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlcore.cli.main import cli

PAGE = Path(__file__).parents[2] / "docs" / "bisect.md"


def test_the_collapse_and_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text()
    program = text.partition("```python\n")[2].partition("```")[0]
    shown = text.partition("$ rlcore bisect runs/good runs/bad\nThe chat")[2].partition("```")[0]
    (tmp_path / "collapse.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "collapse.py"))
    rewards = {
        line.partition(":")[0]: float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if ": reward " in line
    }
    assert rewards["first"] > 0.9
    assert rewards["good"] > 0.9
    assert rewards["bad"] < 0.7
    ran = CliRunner().invoke(cli, ["bisect", "runs/good", "runs/bad"])
    assert ran.exit_code == 1, ran.output
    assert ran.stdout.strip().splitlines() == f"The chat{shown}".strip().splitlines()

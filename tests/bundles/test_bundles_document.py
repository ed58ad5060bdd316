"""The program of docs/bundles.md runs as it stands and prints what the page says."""

import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "bundles.md"


def test_the_program_names_the_generators_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "program.py"))
    printed = capsys.readouterr().out.strip().splitlines()
    assert printed[-2:] == ["None", "generator's log-probabilities"]

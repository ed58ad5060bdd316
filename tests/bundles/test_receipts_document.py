"""The program of docs/receipts.md runs as it stands and prints what the page says."""

import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "receipts.md"


def test_the_program_prints_the_claims_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(tmp_path / "program.py"))
    printed = dict(line.rsplit(": ", 1) for line in capsys.readouterr().out.strip().splitlines()[-13:])
    assert set(printed.values()) == {"held"}
    claims = PAGE.read_text().partition("| Claim | Holds where |")[2].partition("\n\n")[0]
    named = [name.strip() for line in claims.splitlines()[2:] for name in line.split("|")[1].split(",")]
    assert sorted(named) == sorted(printed)

"""`rlcore report`: a file about runs, or what is wrong with them."""

from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 0.5}\n')
    return tmp_path


@pytest.mark.parametrize(("options", "title"), [((), None), (("--title", "Zwei Läufe"), "Zwei Läufe")])
def test_a_page_is_written(invoke, run: Path, options: tuple[str, ...], title: str | None) -> None:
    output = run / "report.html"
    result = invoke("report", str(run), "-o", str(output), *options)
    assert result.exit_code == 0, result.output
    assert f"<title>{title or run.name}</title>" in output.read_text(encoding="utf-8")
    assert str(output) in result.output


def test_what_holds_no_run_is_said_and_nothing_written(invoke, run: Path) -> None:
    result = invoke("report", str(run), str(run / "elsewhere"), "-o", str(run / "report.html"))
    assert result.exit_code == 6
    assert "elsewhere" in result.stderr
    assert not (run / "report.html").exists()
    assert invoke("report").exit_code == 2


def test_a_folder_that_is_not_there_is_named_with_the_option(invoke, run: Path) -> None:
    result = invoke("report", str(run), "-o", str(run / "gone" / "report.html"))
    assert result.exit_code == 11
    assert f"report.html could not be written to {run / 'gone'}" in result.stderr
    assert "Make that folder, or name another file with -o" in result.stderr
    assert "run.directory" not in result.stderr

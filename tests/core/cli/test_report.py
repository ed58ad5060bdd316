"""The report at the end of a run."""

import io
import sys

import pytest
from rich.console import Console

from rlcore.cli.report import run_report

from .shown_run import STEP, SUMMARY  # type: ignore[import-not-found]


def report_text(summary: dict[str, object], records: list[dict[str, float]]) -> str:
    console = Console(width=100, file=io.StringIO())
    console.print(run_report(summary, records))
    return console.file.getvalue()


def test_the_report_of_a_run() -> None:
    text = report_text(SUMMARY, [{"step": 1, **STEP}])
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.split()}
    assert rows["generation"] == ["0.500", "10.0", "25", "%"]
    assert rows["total"] == ["0.500", "40.0", "100", "%"]
    assert "rewards" not in rows, "a phase that never ran"
    assert "1,234 tokens per second (median); 7.2 generated tokens a sample" in text
    assert "in all 50.0 s, set-up 5.0 s" in text
    assert "model: runs/demo/model" in text
    assert text.rstrip().endswith("run directory: runs/demo")


def test_the_report_fits_a_narrow_terminal() -> None:
    records = [{**STEP, "step": step, "reward_mean": step / 40} for step in range(1, 41)]
    console = Console(width=60, file=io.StringIO())
    console.print(run_report(SUMMARY, records, width=console.width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    (ticks,) = (line for line in lines if line.split()[:1] == ["1"])
    assert ticks.split()[-1] == "40", "the curve is cut off at its end"


def test_the_report_without_the_library_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotext", None)
    text = report_text(SUMMARY, [{"step": 1, **STEP}])
    assert "no curve: ModuleNotFoundError: " in text
    assert text.rstrip().endswith("run directory: runs/demo")


def test_the_report_of_a_run_that_measured_nothing() -> None:
    assert report_text({"run_directory": "runs/x"}, []).strip() == "run directory: runs/x"

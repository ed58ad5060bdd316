"""The report at the end of a run."""

import io

import pytest
from rich.console import Console

from rlcore.spi.sink import CHART_GROUP
from rlcore_report.run_report import run_report

from ..core.cli.shown_run import STEP, SUMMARY  # type: ignore[import-not-found]


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


CHARTS = {
    "that draws": ("def chart(records, width): return f'{len(records)} records in {width} columns'", "1 records in 60 columns"),
    "that finds nothing to draw": ("def chart(records, width): return ''", None),
    "that fails": (
        "def chart(records, width): raise ValueError('no axis')",
        "chart 'acme' (acme-charts 1.0): ValueError: no axis",
    ),
    "that cannot be imported": ("import absent_module", "chart 'acme' (acme-charts 1.0) is not usable: import failed"),
    "that is no function": ("chart = 3", "names a int; expected a function"),
}


@pytest.mark.parametrize("kind", CHARTS)
def test_the_report_has_the_installed_charts(installer, kind: str) -> None:
    source, expected = CHARTS[kind]
    installer.add("acme-charts", {CHART_GROUP: {"acme": "acme_charts:chart"}}, acme_charts=source)
    console = Console(width=60, file=io.StringIO())
    console.print(run_report(SUMMARY, [{"step": 1, **STEP}], width=console.width))
    text = console.file.getvalue()
    first = " ".join(text.split("held-out accuracy")[0].split())
    assert first == "" if expected is None else expected in first
    assert text.rstrip().endswith("run directory: runs/demo")


def test_the_report_of_a_run_that_measured_nothing() -> None:
    assert report_text({"run_directory": "runs/x"}, []).strip() == "run directory: runs/x"

"""`rlcore trace`: which steps are written, and what is said where there are none."""

import json
from pathlib import Path

import click
import pytest

from rlcore.run.report.timing import Span, append_timeline
from rlcore_report.trace_command import parse_steps


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "recipe.toml").write_text("")
    spans = [Span(step=step, role="driver", name="train", start=float(step), seconds=(0.5,)) for step in range(1, 11)]
    append_timeline(tmp_path / "timeline.jsonl", spans)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "steps"),
    [((), {6, 7, 8, 9, 10}), (("--steps", "3..4"), {3, 4}), (("--steps", "2"), {2}), (("--steps", "9..99"), {9, 10})],
)
def test_the_last_steps_or_those_that_are_named(invoke, directory: Path, options: tuple[str, ...], steps: set[int]) -> None:
    output = directory / "trace.json"
    result = invoke("trace", str(directory), *options, "-o", str(output))
    assert result.exit_code == 0, result.output
    events = json.loads(output.read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == steps
    assert str(output) in result.output


def test_steps_that_are_not_there_are_said_with_those_that_are(invoke, directory: Path) -> None:
    result = invoke("trace", str(directory), "--steps", "11")
    assert result.exit_code == 2
    assert "found 11; expected some of 1 to 10" in result.stderr


def test_a_run_without_a_timeline(invoke, directory: Path) -> None:
    (directory / "timeline.jsonl").unlink()
    result = invoke("trace", str(directory))
    assert result.exit_code == 6
    assert "no timeline" in result.stderr


@pytest.mark.parametrize("text", ["", "a", "5..3", "1..", "-1", "1...2"])
def test_what_names_no_steps(text: str) -> None:
    with pytest.raises(click.UsageError, match="--steps"):
        parse_steps(text)

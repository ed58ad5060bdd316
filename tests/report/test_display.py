"""A run is shown by plain lines, or by the live display on a terminal."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rlcore.cli.display import open_display
from rlcore.cli.errors import RUN_DIRECTORY
from rlcore_report.display import LiveProgress, ReportedProgress, sparkline

from ..core.cli.shown_run import STEP, SUMMARY, drive  # type: ignore[import-not-found]


def test_plain_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    meta: dict[str, object] = {}
    with open_display("auto", meta) as progress:
        assert isinstance(progress, ReportedProgress), "there is no terminal here"
        drive(progress, tmp_path)
    assert meta == {RUN_DIRECTORY: tmp_path}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run directory {tmp_path}; steps 1 to 3"
    assert lines[1] == "step 0/3  pass@1 0.250"
    assert lines[2] == ("step 1/3  reward 0.333  length 7.2  2.00 s (generation 1.25, train 0.50, other 0.25)  1,234 tokens/s")
    assert lines[5] == "warning: step 3 has nothing to learn from"
    text = "\n".join(lines)
    assert "held-out accuracy (pass@1): 0.250 -> 0.875 (+62.5 points)" in text
    assert f"run directory: {tmp_path}" in text
    assert "\x1b" not in text


def last_frame(screen: io.StringIO) -> str:
    """The text of the last state that a live display drew."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue().rpartition("\x1b[2K")[2])


def test_live_display_shows_phase_step_and_figures(tmp_path: Path) -> None:
    screen = io.StringIO()
    live = LiveProgress(Console(width=100, file=screen, force_terminal=True))

    def shown() -> str:
        with live:
            pass
        return last_frame(screen)

    assert "set-up" in shown()
    live.started(tmp_path, 2, 10)
    live.phase("evaluation")
    live.step(2, {"eval/pass@1": 0.25})
    live.phase("generation")
    live.step(3, STEP)
    live.step(4, {**STEP, "reward_mean": 0.75})
    text = shown()
    assert "generation" in text
    assert "4/10" in text
    assert "pass@1 0.250" in text, "the last evaluation stays"
    assert "reward 0.750" in text
    assert "▁█" in text
    assert "2.00 s (generation 1.25, train 0.50, other 0.25)" in text
    assert "trainer" not in text
    live.pool("trainer", "idle")
    live.pool("generator", "generate on 8 ranks")
    assert "trainer idle   generator generate on 8 ranks" in shown()


def test_live_display_ends_in_the_report_or_leaves_the_last_state(tmp_path: Path) -> None:
    finished = io.StringIO()
    live = LiveProgress(Console(width=100, file=finished, force_terminal=True))
    with live:
        drive(live, tmp_path)
    assert "warning: " in finished.getvalue()
    assert finished.getvalue().count("held-out accuracy") == 1
    failed = io.StringIO()
    live = LiveProgress(Console(width=100, file=failed, force_terminal=True))
    with contextlib.suppress(ZeroDivisionError), live:
        live.started(tmp_path, 0, 10)
        live.step(1, STEP)
        raise ZeroDivisionError
    assert "reward 0.500" in last_frame(failed)
    assert "run directory: " not in failed.getvalue()


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
from rlcore.cli.display import open_display
from shown_run import drive
with open_display("auto", {{}}) as progress:
    drive(progress, Path({directory!r}), 40)
print("went on", file=sys.stderr)
"""


def script(directory: Path) -> list[str]:
    text = SCRIPT.format(folder=str(Path(__file__).parents[1] / "core" / "cli"), directory=str(directory))
    return [sys.executable, "-c", text]


def in_terminal(command: list[str], **environment: str) -> str:
    """The output of a command that runs in a pseudo-terminal."""
    parent, child = pty.openpty()
    variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", **environment}
    if "NO_COLOR" not in environment:
        variables.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=variables) as process:
        os.close(child)
        chunks = []
        try:
            while chunk := os.read(parent, 65536):
                chunks.append(chunk)
        except OSError:  # what Linux answers once the other side is closed
            pass
        assert process.wait(timeout=300) == 0, b"".join(chunks).decode()
    os.close(parent)
    return b"".join(chunks).decode()


def test_a_terminal_gets_the_live_display(tmp_path: Path) -> None:
    output = in_terminal(script(tmp_path))
    assert "40/40" in output
    assert "held-out accuracy" in output
    assert "\x1b[1A" in output, "drawn in place"
    assert "\x1b[32m" in output


def test_no_color_in_a_terminal(tmp_path: Path) -> None:
    output = in_terminal(script(tmp_path), NO_COLOR="1")
    assert "40/40" in output
    assert not [code for code in ("\x1b[3", "\x1b[4", "\x1b[9") if any(f"{code}{digit}m" in output for digit in range(10))]
    assert "\x1b[38;" not in output


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    process = subprocess.Popen(script(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "went on\n"
    assert process.wait(timeout=300) == 0


def test_a_resumed_run_reports_the_whole_curve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [{"step": step, "reward_mean": step / 50, "response_length_mean": 100.0} for step in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    progress = ReportedProgress()
    progress.started(tmp_path, 39, 40)
    progress.step(40, STEP)
    progress.finished(SUMMARY)
    output = capsys.readouterr().out
    assert "steps 40 to 40" in output
    assert "100.0 generated tokens a sample" in output


def test_figures_as_bars() -> None:
    assert sparkline([0.0, 1.0, 0.5, 0.5], 3) == "█▁▁"
    assert sparkline([1.0], 5) == "▁"

"""Spans: from the clock of a process to lines of a file, and back."""

import json
import time
from pathlib import Path

import pytest

from rlcore.run.report.timing import Span, Timeline, append_timeline, read_timeline, rewind_timeline


def test_spans_stand_at_the_time_of_day(tmp_path: Path) -> None:
    timeline, before = Timeline(), time.time()
    start = time.perf_counter()
    timeline.add("driver", "train", start, (1.23456,))
    (span,) = timeline.take(3)
    assert (span.step, span.role, span.name, span.seconds) == (3, "driver", "train", (1.2346,))
    assert span.start == pytest.approx(before, abs=0.5)
    assert timeline.take(4) == []


def test_a_file_is_read_back_without_what_a_crash_left(tmp_path: Path) -> None:
    file = tmp_path / "timeline.jsonl"
    assert read_timeline(file) == []
    rewind_timeline(file, 1)
    assert not file.exists()
    spans = [Span(step=step, role="trainer", name="train_step", start=10.0 + step, seconds=(1.0, 2.0)) for step in (1, 2)]
    for span in spans:
        append_timeline(file, [span])
    with file.open("a") as written:
        written.write('{"step": 3, "la')
    assert read_timeline(file) == spans
    rewind_timeline(file, 1)
    assert read_timeline(file) == spans[:1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": 1e308},
        {"start": float("nan")},
        {"start": 10**400},
        {"start": "1"},
        {"seconds": []},
        {"seconds": [-1e308]},
        {"seconds": [10**400]},
        {"seconds": [None]},
        {"seconds": "12"},
        {"step": 2**63},
        {"step": True},
        {"role": 1},
    ],
    ids=str,
)
def test_lines_that_no_trace_can_show_are_left_out(tmp_path: Path, wrong: dict[str, object]) -> None:
    file = tmp_path / "timeline.jsonl"
    span = {"step": 1, "role": "driver", "name": "train", "start": 1.0, "seconds": [0.5]}
    file.write_text(f"{json.dumps(span)}\n{json.dumps({**span, **wrong})}\n")
    assert read_timeline(file) == [Span(**span)]

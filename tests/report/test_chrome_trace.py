"""Traces in Chrome's format: where each span stands, and of which process and thread it is."""

from rlcore.run.report.timing import Span
from rlcore_report.chrome_trace import chrome_trace

SPANS = [
    Span(step=1, role="driver", name="generation", start=1000.5, seconds=(1.5,)),
    Span(step=1, role="driver", name="train", start=1002.0, seconds=(0.25,)),
    Span(step=1, role="trainer", name="train_step", start=1002.0, seconds=(0.2, 0.25)),
    Span(step=2, role="driver", name="checkpoint", start=1003.0, seconds=(0.5,)),
]


def test_lanes_are_processes_and_ranks_are_threads() -> None:
    events = chrome_trace(SPANS)["traceEvents"]
    names = {(event["name"], event["pid"], event["tid"]): event["args"]["name"] for event in events if "name" in event["args"]}
    assert names == {
        ("process_name", 0, 0): "driver",
        ("thread_name", 0, 0): "steps",
        ("thread_name", 0, 1): "phases",
        ("process_name", 1, 0): "trainer",
        ("thread_name", 1, 0): "rank 0",
        ("thread_name", 1, 1): "rank 1",
    }


def test_times_are_microseconds_from_the_first_span_on() -> None:
    events = [event for event in chrome_trace(SPANS)["traceEvents"] if event["ph"] == "X"]
    assert {
        (event["name"], event["pid"], event["tid"], event["ts"], event["dur"], event["args"]["step"]) for event in events
    } == {
        ("generation", 0, 1, 0, 1_500_000, 1),
        ("train", 0, 1, 1_500_000, 250_000, 1),
        ("train_step", 1, 0, 1_500_000, 200_000, 1),
        ("train_step", 1, 1, 1_500_000, 250_000, 1),
        ("checkpoint", 0, 1, 2_500_000, 500_000, 2),
        ("step 1", 0, 0, 0, 1_750_000, 1),
        ("step 2", 0, 0, 2_500_000, 500_000, 2),
    }


def test_nothing_makes_an_empty_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []

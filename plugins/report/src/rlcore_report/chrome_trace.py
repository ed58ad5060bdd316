"""The timeline of a run as a trace in Chrome's format, which ui.perfetto.dev and chrome://tracing show.

"Trace Event Format" (Google, 2016): complete events (ph "X") with times in microseconds, one process a role, one thread a rank.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from rlcore.run.report.timing import DRIVER, Span

STEPS_THREAD, DRIVER_THREAD = 0, 1
US = 1_000_000


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """A trace of spans, in any order; the first of them begins at 0."""
    roles = sorted({span.role for span in spans}, key=lambda role: (role != DRIVER, role))
    zero = min((span.start for span in spans), default=0.0)
    events = [event for number, role in enumerate(roles) for event in _names(number, role, spans)]
    events += [event for span in spans for event in _events(span, roles.index(span.role), zero)]
    return {"traceEvents": [*events, *_steps(spans, zero)], "displayTimeUnit": "ms"}


def _names(process: int, role: str, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    yield _named("process_name", process, 0, role)
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    if role == DRIVER:
        yield _named("thread_name", process, STEPS_THREAD, "steps")
        yield _named("thread_name", process, DRIVER_THREAD, "phases")
        return
    for rank in range(max(len(span.seconds) for span in spans if span.role == role)):
        yield _named("thread_name", process, rank, f"rank {rank}")


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _events(span: Span, process: int, zero: float) -> Iterator[dict[str, Any]]:
    for rank, seconds in enumerate(span.seconds):
        thread = DRIVER_THREAD if span.role == DRIVER else rank
        yield _complete(span.name, process, thread, span.start - zero, seconds, span.step)


def _steps(spans: Sequence[Span], zero: float) -> Iterator[dict[str, Any]]:
    """Each step from the first of its phases to the end of the last, above the driver's phases."""
    phases = sorted((span for span in spans if span.role == DRIVER), key=attrgetter("step"))
    for step, group in groupby(phases, attrgetter("step")):
        of_step = list(group)
        start = min(span.start for span in of_step)
        end = max(span.start + max(span.seconds) for span in of_step)
        yield _complete(f"step {step}", 0, STEPS_THREAD, start - zero, end - start, step)


def _complete(name: str, process: int, thread: int, start: float, seconds: float, step: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": round(start * US),
        "dur": round(seconds * US),
        "args": {"step": step},
    }

"""Measures the seconds of each phase of a step; timeline.jsonl has what the driver and the workers did when."""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os.path import lexists
from pathlib import Path

from attrs import asdict, define, field, frozen

from rlcore.files import storage_errors, write_atomically
from rlcore.reading import parse_json, read_bytes
from rlcore.run.report.progress import Progress

DRIVER = "driver"
"""The role of the process that runs the loop; other roles are pools of workers."""
DECIMALS = 4
"""Tenths of a millisecond: less than a phase of any step takes."""

MAX_NUMBER = 2**63
"""Lines with a number from here on are damaged."""


def _as_tuple(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(seconds)


@frozen(kw_only=True)
class Span:
    """Something that went on in a role."""

    step: int
    """The step in whose time it ended; what follows a step, such as its checkpoint, is in the time of the next one."""
    role: str
    name: str
    """A phase, or a call of all ranks of a pool."""
    start: float
    """Seconds since 1970, by the driver's clock."""
    seconds: tuple[float, ...] = field(converter=_as_tuple)
    """[R]: how long it took, until the driver heard of it; one for each rank that took part, in their order."""


@define(eq=False)
class Timeline:
    """Gathers what is done until a step has ended. Spans may be added from any thread."""

    _spans: list[tuple[str, str, float, tuple[float, ...]]] = field(factory=list, init=False)
    _epoch: float = field(factory=lambda: time.time() - time.perf_counter(), init=False)
    """The time at which time.perf_counter() is 0, in seconds since 1970."""

    def add(self, role: str, name: str, start: float, seconds: Sequence[float]) -> None:
        """Something is over that began at `start`, by time.perf_counter()."""
        self._spans.append((role, name, start, tuple(seconds)))

    def take(self, step: int) -> list[Span]:
        """Return the spans since the last call, as those of a step."""
        taken, self._spans = self._spans, []
        return [
            Span(
                step=step,
                role=role,
                name=name,
                start=round(self._epoch + start, DECIMALS),
                seconds=tuple(round(each, DECIMALS) for each in seconds),
            )
            for role, name, start, seconds in taken
        ]


def append_timeline(path: Path, spans: Sequence[Span]) -> None:
    """Write a line for each. Raises StorageError where they cannot be written."""
    with storage_errors(path.name, path.parent), path.open("a") as file:
        file.write("".join(json.dumps(asdict(span)) + "\n" for span in spans))


def read_timeline(path: Path) -> list[Span]:
    """Read a file's spans; a missing one has none. Lines that a crash cut short are left out: no figure depends on them."""
    lines = read_bytes(path).splitlines() if lexists(path) else []
    return [span for line in lines if (span := _parse(line)) is not None]


def rewind_timeline(path: Path, step: int) -> None:
    """Forget what was done after a step, which is done again."""
    if lexists(path):
        kept = [json.dumps(asdict(span)) + "\n" for span in read_timeline(path) if span.step <= step]
        write_atomically(path, "".join(kept))


def _parse(line: bytes) -> Span | None:
    try:
        span = Span(**parse_json(line))
    except (ValueError, TypeError):
        return None
    numbers = (span.step, span.start, *span.seconds)
    is_span = type(span.step) is int and isinstance(span.role, str) and isinstance(span.name, str) and bool(span.seconds)
    # Neither infinite nor NaN, and small enough for microseconds.
    return span if is_span and all(type(one) in (int, float) and abs(one) < MAX_NUMBER for one in numbers) else None


STEP_PHASES = ("generation", "rewards", "logprobs", "train", "refit", "offload")
"""Parts of a step; what remains of its total is `other`."""


class PhaseClock:
    """Adds up wall-clock seconds by phase, per step and over the whole run, and tells the display what is happening."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._step: defaultdict[str, float] = defaultdict(float)
        self._step_start = time.perf_counter()
        self.totals: defaultdict[str, float] = defaultdict(float)
        """Seconds by phase over the whole run."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block as phase `name`."""
        self._progress.phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._step[name] += seconds
            self.totals[name] += seconds
            self._progress.span(DRIVER, name, start, (seconds,))

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count some seconds of one phase as another's, which went on within it."""
        for counted in (self._step, self.totals):
            counted[source] -= seconds
            counted[target] += seconds

    def begin_step(self) -> None:
        """Start counting a step; what ran between two steps is in no step's figures."""
        self._step.clear()
        self._step_start = time.perf_counter()

    def end_step(self) -> dict[str, float]:
        """The step's `time/<phase>_s` metrics; `time/other_s` is what no phase covers."""
        total_s = time.perf_counter() - self._step_start
        metrics = {f"time/{name}_s": self._step[name] for name in STEP_PHASES}
        other_s = max(0.0, total_s - sum(metrics.values()))
        self.totals["other"] += other_s
        self.totals["total"] += total_s
        return {"time/total_s": total_s, **metrics, "time/other_s": other_s}


def idle_seconds(times: Mapping[str, float], generating_s: float | None) -> dict[str, float]:
    """Seconds of a step, given the metrics of `end_step`, in which the trainer computed nothing, and in which nothing was
    generated; the latter where `generating_s`, those in which something was, are known. Refits and moves are neither's work."""
    total_s = times["time/total_s"]
    idle = {"time/trainer_idle_s": max(0.0, total_s - times["time/train_s"] - times["time/logprobs_s"])}
    if generating_s is not None:
        idle["time/generator_idle_s"] = max(0.0, total_s - generating_s)
    return idle

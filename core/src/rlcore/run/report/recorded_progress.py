"""Passes a run's progress on to the display, and writes it into status.json and timeline.jsonl."""

import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from attrs import asdict, define, evolve, field, frozen

from rlcore.reading import read_record
from rlcore.registry.plugin_errors import message_of
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import Timeline, append_timeline
from rlcore.schema.constraints import Count, Finite
from rlcore.schema.printable import class_name
from rlcore.secrets import masked
from rlcore.spi import InterruptedRun, RlcoreError, StorageError

UNEXPECTED = 70
"""Exit code of an error that is no RlcoreError."""
INTERRUPTED = 130
"""Exit code of Ctrl-C."""
MAX_MESSAGE_CHARACTERS = 2000
NUM_RECENT_STEPS = 20
"""The pace is that of the last so many steps."""


@frozen(kw_only=True)
class RunError:
    """The error that ended a run before its last step."""

    exit_code: int
    message: str


@frozen(kw_only=True)
class Status:
    """The content of status.json. Times are seconds since 1970."""

    state: Literal["running", "complete", "interrupted", "failed"]
    """The state that the process wrote; a process that was killed wrote no end."""
    process: int
    host: str
    started: Finite
    step: Count
    """Steps that are done."""
    num_steps: Count
    """Steps that the run is to have; 0 while it is being set up."""
    phase: str
    phase_since: Finite
    step_s: Finite | None = None
    """Seconds from one step's end to the next one's, evaluations and checkpoints included; None before there were two."""
    error: RunError | None = None


@define(eq=False)
class StatusFile:
    """The file of one run, open as long as that runs: a phase is written without opening, syncing or renaming anything."""

    path: Path
    _file: int = field(init=False)
    _ends: deque[float] = field(factory=lambda: deque(maxlen=NUM_RECENT_STEPS + 1), init=False)
    """When steps have ended, by time.monotonic: the machine's clock may be set meanwhile."""
    _num_bytes: int = field(default=0, init=False)
    status: Status = field(init=False)

    @_file.default
    def _open(self) -> int:
        return os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    @status.default
    def _at_first(self) -> Status:
        now = time.time()
        return Status(
            state="running",
            process=os.getpid(),
            host=socket.gethostname(),
            started=now,
            step=0,
            num_steps=0,
            phase="set-up",
            phase_since=now,
        )

    def __attrs_post_init__(self) -> None:
        self._write(self.status)

    def phase(self, name: str) -> None:
        """Write the phase that begins."""
        if name != self.status.phase:
            self._write(evolve(self.status, phase=name, phase_since=time.time()))

    def begins(self, start_step: int, num_steps: int) -> None:
        """So many steps of the run's are done, and the next one begins."""
        self._ends.clear()
        self._ends.append(time.monotonic())
        self._write(evolve(self.status, step=start_step, num_steps=num_steps, step_s=None))

    def ended_step(self, step: int) -> None:
        """A step is done. Step 0 is the evaluation before the first one: the pace counts from its end.
        A phase that the next step begins with as well counts from here, so that a long one is one that takes long."""
        if step == 0:
            self._ends.clear()
        self._ends.append(time.monotonic())
        steps = len(self._ends) - 1
        step_s = (self._ends[-1] - self._ends[0]) / steps if steps else None
        self._write(evolve(self.status, step=step, phase_since=time.time(), step_s=step_s))

    def close(self, error: BaseException | None) -> None:
        """The run is over: complete, or ended by an error."""
        over = evolve(self.status, phase="over", phase_since=time.time())
        interrupted = isinstance(error, InterruptedRun | KeyboardInterrupt)
        state: Literal["complete", "interrupted", "failed"] = "interrupted" if interrupted else "failed"
        self._write(evolve(over, state="complete" if error is None else state, error=None if error is None else _told(error)))
        os.close(self._file)

    def _write(self, status: Status) -> None:
        """One call of the system over the whole of what stood there, so that no reader finds half of it."""
        self.status = status
        text = json.dumps(asdict(status)).encode()
        os.pwrite(self._file, text.ljust(self._num_bytes) + b"\n", 0)
        self._num_bytes = max(self._num_bytes, len(text))


def read_status(path: Path) -> Status | None:
    """Read the status file; None where it is absent, or empty since its run has not written yet. CheckpointError where it is
    damaged."""
    if not os.path.lexists(path) or (path.is_file() and not path.stat().st_size):
        return None
    return read_record(path, Status)


def _told(error: BaseException) -> RunError:
    code = error.exit_code if isinstance(error, RlcoreError) else UNEXPECTED
    name = "" if isinstance(error, RlcoreError) else f"{class_name(error)}: "
    if isinstance(error, KeyboardInterrupt):
        return RunError(exit_code=INTERRUPTED, message="interrupted")
    lines = [f"{name}{message_of(error)}", *getattr(error, "__notes__", ())]
    return RunError(exit_code=code, message=masked("\n".join(lines))[:MAX_MESSAGE_CHARACTERS])


class RecordedProgress(Progress):
    """Passes every event on. A file that cannot be written is noted once, and ends no run: it is for looking at it alone."""

    def __init__(self, display: Progress, *, status_file: Path, timeline_file: Path) -> None:
        self._display = display
        self._timeline = Timeline()
        self._timeline_file = timeline_file
        self._status_file = status_file
        self._status: StatusFile | None = None
        self._last_step: int | None = None
        self._broken: set[Path] = set()

    def __enter__(self) -> "RecordedProgress":
        self._recording(self._status_file, self._open_status)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._last_step is not None:
            self._flush(self._last_step + (kind is not None))  # an error ended a step that had begun
        if self._status is not None:
            status = self._status
            self._recording(self._status_file, lambda: status.close(error))

    def started(self, run_directory: Path, start_step: int, num_steps: int) -> None:
        """The run begins; what its set-up took belongs to the first step."""
        self.run_directory, self._last_step = run_directory, start_step
        self._tell(lambda status: status.begins(start_step, num_steps))
        self._display.started(run_directory, start_step, num_steps)

    def phase(self, name: str) -> None:
        """Pass on, and write down."""
        self._tell(lambda status: status.phase(name))
        self._display.phase(name)

    def samples(self, num_finished: int, num_samples: int) -> None:
        """Pass on."""
        self._display.samples(num_finished, num_samples)

    def pool(self, name: str, doing: str) -> None:
        """Pass on."""
        self._display.pool(name, doing)

    def span(self, role: str, name: str, start: float, seconds: Sequence[float]) -> None:
        """Keep until the step's end, and pass on."""
        self._timeline.add(role, name, start, seconds)
        self._display.span(role, name, start, seconds)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write down what was done until now, and pass on."""
        self._last_step = step
        self._tell(lambda status: status.ended_step(step))
        self._flush(step)
        self._display.step(step, metrics)

    def note(self, text: str) -> None:
        """Pass on."""
        self._display.note(text)

    def finished(self, summary: Mapping[str, object]) -> None:
        """Pass on."""
        self._display.finished(summary)

    def _open_status(self) -> None:
        self._status = StatusFile(self._status_file)

    def _tell(self, tell: Callable[[StatusFile], None]) -> None:
        if self._status is not None:
            status = self._status
            self._recording(self._status_file, lambda: tell(status))

    def _flush(self, step: int) -> None:
        spans = self._timeline.take(step)
        if spans:
            self._recording(self._timeline_file, lambda: append_timeline(self._timeline_file, spans))

    def _recording(self, path: Path, write: Callable[[], None]) -> None:
        if path in self._broken:
            return
        try:
            write()
        except (OSError, StorageError) as error:
            self._broken.add(path)
            self._display.note(f"{path.name} is not written any more; the run goes on: {error}")

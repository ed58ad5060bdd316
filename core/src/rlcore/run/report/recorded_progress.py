"""Passes a run's progress on to the display, and writes it into status.json and timeline.jsonl."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rlcore.run.report.progress import Progress
from rlcore.run.report.status_file import StatusFile
from rlcore.run.report.timeline import Timeline, append_timeline
from rlcore.spi import StorageError


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

    def span(self, lane: str, name: str, start: float, seconds: Sequence[float]) -> None:
        """Keep until the step's end, and pass on."""
        self._timeline.add(lane, name, start, seconds)
        self._display.span(lane, name, start, seconds)

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

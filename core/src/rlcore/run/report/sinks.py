"""The metric sinks of a run: what each is given, and what happens where one fails."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from rlcore.registry.plugin_errors import first_line, in_time, is_outside
from rlcore.run.report.progress import Progress
from rlcore.spi import EvaluationSink, LoggedSample, RlcoreError, SampleSink, Sink

LIMIT_TIMES = 2.0
"""The limit of a call, in relation to that of loading code: a tracker may take a minute until all has arrived."""


class Sinks:
    """The sinks of a run, by the names used in messages. One that raises or does not return is noted, and called no more."""

    def __init__(self, progress: Progress) -> None:
        self._sinks: dict[str, Sink] = {}
        self._progress = progress
        self.summary: Mapping[str, object] | None = None
        """The content of summary.json, once the run is complete."""

    def add(self, label: str, sink: Sink) -> None:
        """Add a sink."""
        self._sinks[label] = sink

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the figures of a step to each sink."""
        self._each(lambda sink: sink.log(step, dict(metrics)))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the figures of a checkpoint's evaluation to each sink that takes them."""
        self._each(
            lambda sink: (
                cast("EvaluationSink", sink).log_evaluation(step, dict(metrics)) if hasattr(sink, "log_evaluation") else None
            )
        )

    @property
    def without_evaluations(self) -> list[str]:
        """Return the names of sinks that take no figures of evaluations."""
        return [label for label, sink in self._sinks.items() if not hasattr(sink, "log_evaluation")]

    @property
    def take_samples(self) -> bool:
        """Return whether any of them is a SampleSink."""
        return any(hasattr(sink, "log_samples") for sink in self._sinks.values())

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Give samples of a step to each sink that takes them."""
        self._each(lambda sink: cast("SampleSink", sink).log_samples(step, samples) if hasattr(sink, "log_samples") else None)

    def close(self) -> None:
        """End each sink."""
        self._each(lambda sink: sink.close(None if self.summary is None else dict(self.summary)), "failed when the run ended")

    def _each(self, call: Callable[[Sink], None], failure: str = "failed and gets nothing more; the run goes on") -> None:
        for label, sink in list(self._sinks.items()):
            try:
                with in_time(f"a call of {label}", LIMIT_TIMES):
                    call(sink)
            except BaseException as error:  # a panic in a native library is no Exception
                if is_outside(error):
                    raise
                del self._sinks[label]
                name, line = type(error).__name__, first_line(error)
                cause = line if isinstance(error, RlcoreError) or line == name else f"{name}: {line}"
                self._progress.note(f"{label} {failure}: {cause}")

"""Sink `trackio`: figures, the recipe and samples of a run in Trackio."""

import tomllib
from collections.abc import Mapping, Sequence

import attrs
import trackio

from rlcore.spi import LoggedSample, SinkContext
from rlcore_trackio.config import TrackioConfig
from rlcore_workers.background_sink import BackgroundSink


class TrackioRun:
    """A Tracker. Trackio finds a run by its name alone, which another run may have by now: its own id tells which one it is."""

    def __init__(self, context: SinkContext, config: TrackioConfig, resumed: str | None) -> None:
        self._run = None if resumed is None else _resumed(context, config, resumed)
        if self._run is None:
            self._run = _opened(context, config, context.run_name, "never")
        self.id = f"{self._run.id} {self._run.name}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of a step, under their names."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """A table at the step."""
        self._run.log({"samples": trackio.Table(data=[attrs.asdict(sample) for sample in samples])}, step=step)

    def end(self, summary: Mapping[str, object] | None) -> None:
        """Finished, or failed: as the figure `run/finished`, 1 or 0, since Trackio keeps no such state."""
        self._run.log({"run/finished": float(summary is not None)})
        self._run.finish()


def _resumed(context: SinkContext, config: TrackioConfig, known: str) -> trackio.Run | None:
    """The run of that id and name; None where it has another name since, or is gone."""
    identity, _, name = known.partition(" ")
    run = _opened(context, config, name, "allow")
    if run.id == identity:
        return run
    run.finish()  # another one, to which nothing was written
    return None


def _opened(context: SinkContext, config: TrackioConfig, name: str, resume: str) -> trackio.Run:
    return trackio.init(
        project=config.project,
        name=name,
        group=config.group,
        space_id=config.space_id,
        config={**tomllib.loads(context.recipe), "tags": list(config.tags)},
        resume=resume,
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


class TrackioSink(BackgroundSink):
    """One run of the project, also where it is resumed."""

    def __init__(self, context: SinkContext, config: TrackioConfig) -> None:
        super().__init__(
            context.run_directory / "trackio.json", lambda resumed: TrackioRun(context, config, resumed), config.names_as
        )

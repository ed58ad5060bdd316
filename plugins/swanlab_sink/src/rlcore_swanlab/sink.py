"""Sink `swanlab`: figures, the recipe and samples of a run in SwanLab."""

import tomllib
from collections.abc import Mapping, Sequence

import attrs
import swanlab

from rlcore.spi import LoggedSample, RlcoreError, SinkContext
from rlcore_swanlab.config import SwanLabConfig
from rlcore_workers.background_sink import BackgroundSink


class SwanLabRun:
    """A Tracker. SwanLab finds a run by its id, which no other run of the project has."""

    def __init__(self, context: SinkContext, config: SwanLabConfig, resumed: str | None) -> None:
        try:
            self._run = _opened(context, config, resumed)
        except RuntimeError as error:
            raise RlcoreError(
                f"SwanLab opens no run: {str(error).rstrip('.')}. Run `swanlab login`, set SWANLAB_API_KEY, or have "
                'sinks.swanlab.mode = "offline" (or SWANLAB_MODE=offline) keep the run here for `swanlab sync`.'
            ) from error
        self.id = self._run.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of a step, which may be an earlier one, under their names."""
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """A table at the step."""
        table = swanlab.echarts.Table()
        table.add([field.name for field in attrs.fields(LoggedSample)], [list(attrs.astuple(sample)) for sample in samples])
        self._run.log({"samples": table}, step=step)

    def end(self, summary: Mapping[str, object] | None) -> None:
        """Finished, with what summary.json holds in the configuration as `summary`; or failed."""
        if summary is None:
            self._run.finish(state="crashed", error="the run ended before its last step")
            return
        self._run.config.update({"summary": dict(summary)})
        self._run.finish()


def _opened(context: SinkContext, config: SwanLabConfig, resumed: str | None) -> swanlab.Run:
    return swanlab.init(
        project=config.project,
        workspace=config.workspace,
        group=config.group,
        tags=list(config.tags),
        mode=config.mode,
        name=context.run_name,
        id=resumed,
        resume="never" if resumed is None else "allow",
        log_dir=str(context.run_directory / "swanlab"),
        config=tomllib.loads(context.recipe),
        # No terminal is asked for a key, and none is recorded.
        settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
    )


class SwanLabSink(BackgroundSink):
    """One run of the project, also where it is resumed."""

    def __init__(self, context: SinkContext, config: SwanLabConfig) -> None:
        super().__init__(
            context.run_directory / "swanlab.json", lambda resumed: SwanLabRun(context, config, resumed), config.names_as
        )

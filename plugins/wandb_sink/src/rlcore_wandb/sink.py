"""Sink `wandb`: figures, the recipe and samples of a run in Weights & Biases."""

import os
import tomllib
from collections.abc import Mapping, Sequence

import attrs
import wandb

from rlcore.spi import LoggedSample, RlcoreError, SinkContext
from rlcore_wandb.config import WandbConfig
from rlcore_workers.background_sink import BackgroundSink


class WandbRun:
    """A Tracker."""

    def __init__(self, context: SinkContext, config: WandbConfig, resumed: str | None) -> None:
        # Silent from the start, without which wandb asks a terminal for a key.
        wandb.setup(settings=wandb.Settings(silent=True))
        try:
            self._run = _opened(context, config, resumed)
        except wandb.errors.UsageError as error:
            raise RlcoreError(
                f"W&B opens no run: {str(error).rstrip('.')}. Run `wandb login`, set WANDB_API_KEY, or have "
                'sinks.wandb.mode = "offline" (or WANDB_MODE=offline) keep the run here for `wandb sync`.'
            ) from error
        self.id = self._run.id
        for later in ("checkpoint_eval/*", "receipts/*"):
            self._run.define_metric(later, step_metric="checkpoint_eval/step")
        self._later: list[dict[str, float]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of a step, under their names."""
        row = self._later.pop(0) if self._later else {}
        self._run.log({**row, **metrics}, step=step, commit=True)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Figures over an axis of their own, `checkpoint_eval/step`, in the rows of later steps: W&B's own steps only grow."""
        self._later.append({**metrics, "checkpoint_eval/step": step})

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """A table, in the row of the step's figures."""
        columns = [field.name for field in attrs.fields(LoggedSample)]
        rows = [list(attrs.astuple(sample)) for sample in samples]
        self._run.log({"samples": wandb.Table(columns=columns, data=rows)}, step=step, commit=False)

    def end(self, summary: Mapping[str, object] | None) -> None:
        """Finished, with summary.json in its summary; or failed."""
        for row in self._later:
            self._run.log(row)
        self._run.summary.update({} if summary is None else {f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=1 if summary is None else 0)


def _opened(context: SinkContext, config: WandbConfig, resumed: str | None) -> wandb.Run:
    return wandb.init(
        project=config.project,
        entity=config.entity,
        group=config.group,
        tags=list(config.tags),
        mode=config.mode or os.environ.get("WANDB_MODE") or "online",
        name=context.run_name,
        id=resumed,
        resume="allow",
        dir=context.run_directory,
        config=tomllib.loads(context.recipe),
        settings=wandb.Settings(console="off", silent=True),
    )


class WandbSink(BackgroundSink):
    """One run of the project, also where it is resumed."""

    def __init__(self, context: SinkContext, config: WandbConfig) -> None:
        super().__init__(
            context.run_directory / "wandb.json", lambda resumed: WandbRun(context, config, resumed), config.names_as
        )

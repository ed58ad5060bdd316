"""Sink `mlflow`: figures, the recipe and samples of a run in MLflow."""

import math
import re
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence

import attrs
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from rlcore.spi import LoggedSample, SinkContext
from rlcore_mlflow.config import MlflowConfig
from rlcore_workers.background_sink import BackgroundSink

BATCH = 100
"""Params and, with room for ten times as many, metrics of one request, by MLflow's REST interface."""
MAX_PARAM = 500
"""Characters of a value that every store takes."""
MAX_NAME = 250
OTHER_CHARACTERS = re.compile(r"[^\w\-. :/]")


def flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and their values as text."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def name_of(name: str) -> str:
    """The name with "_at_" in place of "@", and "_" in place of what else MLflow takes in no name of a metric or param: rewards
    and data sets of a recipe have names of any kind."""
    parts = OTHER_CHARACTERS.sub("_", name.replace("@", "_at_")).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts)[:MAX_NAME]


class MlflowRun:
    """A Tracker."""

    def __init__(self, context: SinkContext, config: MlflowConfig, resumed: str | None) -> None:
        self._mlflow = MlflowClient(tracking_uri=config.tracking_uri)
        if resumed is not None:
            self.id = resumed
            self._mlflow.update_run(resumed, status="RUNNING")
            return
        experiment = self._experiment(config.experiment)
        tags = dict(tag.partition("=")[::2] for tag in config.tags)
        self.id = self._mlflow.create_run(experiment, run_name=context.run_name, tags=tags).info.run_id
        params = [Param(name_of(key), value[:MAX_PARAM]) for key, value in flat(tomllib.loads(context.recipe))]
        for start in range(0, len(params), BATCH):
            self._mlflow.log_batch(self.id, params=params[start : start + BATCH])
        self._mlflow.log_text(self.id, context.recipe, "recipe.toml")

    def _experiment(self, name: str) -> str:
        """The id of the experiment, which is made where there is none of that name."""
        if (found := self._mlflow.get_experiment_by_name(name)) is None:
            try:
                return str(self._mlflow.create_experiment(name))
            except MlflowException:
                if (found := self._mlflow.get_experiment_by_name(name)) is None:  # else another run was faster
                    raise
        return str(found.experiment_id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The figures of a step that are numbers, under `name_of` each."""
        now = int(time.time() * 1000)
        found = [Metric(name_of(name), value, now, step) for name, value in metrics.items() if math.isfinite(value)]
        self._mlflow.log_batch(self.id, metrics=found)

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Rows of the table samples.json, which all steps share."""
        rows = [{"step": step, **attrs.asdict(sample)} for sample in samples]
        self._mlflow.log_table(self.id, {name: [row[name] for row in rows] for name in rows[0]}, "samples.json")

    def end(self, summary: Mapping[str, object] | None) -> None:
        """FINISHED, with summary.json as a file, or FAILED."""
        if summary is not None:
            self._mlflow.log_dict(self.id, dict(summary), "summary.json")
        self._mlflow.set_terminated(self.id, "FAILED" if summary is None else "FINISHED")


class MlflowSink(BackgroundSink):
    """One run of the experiment, also where it is resumed."""

    def __init__(self, context: SinkContext, config: MlflowConfig) -> None:
        super().__init__(
            context.run_directory / "mlflow.json", lambda resumed: MlflowRun(context, config, resumed), config.names_as
        )

"""Sinks that are each wrong in one known way, made from one that keeps the last figures of a run in a file."""

import json

from attrs import frozen
from mutants import killed_by

from rlcore.spi import SPI_VERSION, Provider


@frozen(kw_only=True)
class LastFiguresConfig:
    """It has no options."""


class LastFigures:
    """A right one."""

    def __init__(self, context, config):
        self.file = context.run_directory / "last.json"

    def log(self, step, metrics):
        self.file.write_text(json.dumps({"step": step, **metrics}))

    def close(self, summary):
        """Nothing is open."""


PROVIDER = Provider(name="last", spi=SPI_VERSION, config=LastFiguresConfig, backend=f"{__name__}:LastFigures")


@killed_by("test_a_whole_run")
class AddsItsOwnFigure(LastFigures):
    def log(self, step, metrics):
        try:
            metrics["mine"] = 1.0
        except TypeError as error:
            raise ValueError("the figures are read-only") from error


@killed_by("test_a_whole_run")
class NeedsEveryFigure(LastFigures):
    def log(self, step, metrics):
        if "reward_mean" not in metrics:
            raise ValueError("no reward_mean")


@killed_by("test_figures_of_evaluations")
class TakesNoEarlierStep(LastFigures):
    def log_evaluation(self, step, metrics):
        if step < json.loads(self.file.read_text())["step"]:
            raise ValueError("an earlier step")


@killed_by("test_a_run_that_ended_early")
class NeedsASummary(LastFigures):
    def close(self, summary):
        if summary is None:
            raise ValueError("no summary")


@killed_by("test_a_run_that_ended_early")
class ClosesNoSinkWithoutFigures(LastFigures):
    def close(self, summary):
        self.file.rename(self.file.with_suffix(".closed"))


@killed_by("test_a_resumed_run")
class MakesItsFileOnce(LastFigures):
    def __init__(self, context, config):
        super().__init__(context, config)
        self.file.touch(exist_ok=False)


@killed_by("test_a_resumed_run")
class StepsOnlyGrow(LastFigures):
    def log(self, step, metrics):
        if self.file.exists() and json.loads(self.file.read_text())["step"] >= step > 0:
            raise ValueError(f"step {step} has been logged")
        super().log(step, metrics)


@killed_by("test_figures_that_are_not_finite")
class WritesStrictJson(LastFigures):
    def log(self, step, metrics):
        self.file.write_text(json.dumps({"step": step, **metrics}, allow_nan=False))

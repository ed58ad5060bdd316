"""A metric sink: where the figures of a run go besides metrics.jsonl, such as a tracker of experiments."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from attrs import frozen

CHART_GROUP = "rlcore.charts"
"""Entry-point group of functions that draw a finished run as text. Each is called as function(records, width) -> str, with the
lines of metrics.jsonl and the largest width. It returns "" where it finds nothing to draw."""


@frozen(kw_only=True)
class SinkContext:
    """The context of a sink, which is built as Class(context, config) in the driver."""

    run_directory: Path
    """Absolute path of the run's folder, which exists; a sink's files have other names than docs/run-directory.md lists. While
    a sink of a resumed run is built, recipe.toml is still the one that the run had before."""
    run_name: str
    """The recipe's `run.name`."""
    recipe: str
    """The recipe as it runs, with every default, as TOML."""


class Sink(Protocol):
    """Receives the figures of a run.

    What it raises never ends the run: the user reads of it once, and the sink is called no more. It works inside the step, so
    that what is slow belongs in a thread of its own.
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the figures of a step, once its line is in metrics.jsonl.

        `step` is 0 for the evaluation before the first step. A resumed run may log a step again.
        """

    def close(self, summary: Mapping[str, object] | None) -> None:
        """End. `summary` holds what summary.json does; None where the run ended before its last step."""


@frozen(kw_only=True)
class LoggedSample:
    """One rollout as a sink shows it."""

    group: int
    """The number of its prompt within the step."""
    prompt: str
    """The model's input before its first token; "[image]" stands in front of it for each image."""
    response: str
    """The text of all turns of the model."""
    reward: float
    advantage: float | None
    """Mean over the tokens of the loss; None where the algorithm has none, or trains on other sequences."""


class EvaluationSink(Sink, Protocol):
    """A sink that also takes figures that come later: any sink with this method."""

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take figures of the checkpoint of a step, `checkpoint_eval/NAME` each, or of its receipt, `receipts/NAME`. They come
        after those of later steps, since they are computed beside the training; a resumed run may log a step again."""


class SampleSink(Sink, Protocol):
    """A sink that also takes some rollouts: any sink with this method."""

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        """Take rollouts of a step, before its figures, as often and as many as `[logging]` says."""

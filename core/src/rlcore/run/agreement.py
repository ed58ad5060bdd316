"""Whether generator and trainer agree: a step's first update is held to bounds, and the samples that break them are kept."""

from pathlib import Path
from typing import Protocol

from attrs import define

from rlcore.run.disagreement import WorstSamples
from rlcore.run.groups import TrainerGroup
from rlcore.run.minibatch import Minibatch
from rlcore.run.progress import Progress
from rlcore.spi import (
    GENERATION_LOGPROBS,
    BoundError,
    LossSpec,
    RefitError,
    StorageError,
    TrainStepResult,
)
from rlcore.spi.arrays import take_rows

METRIC = "token_mult_prob_error"
DOCUMENT = "docs/train-inference-agreement.md"


class DisagreementWriter(Protocol):
    """Keeps the samples on which the two disagree most."""

    def save_disagreement(self, step: int, heading: str, worst: WorstSamples) -> Path:
        """Write a step's worst samples; the path of the table."""


@define(kw_only=True, eq=False)
class Agreement:
    """Watches METRIC in each step's first update, the only one that finds the weights that generated.

    A trainer that takes bounds refuses the update before anything changes. Above `end_above` the run then ends; above
    `warn_above` the samples are written, a note says so, and the update is made after all. Other trainers are judged by the
    figure that they return, so the log-probabilities written are those after the update.
    """

    trainer: TrainerGroup
    writer: DisagreementWriter
    progress: Progress
    warn_above: float
    end_above: float
    warned: bool = False
    """Whether the last update lay above `warn_above`: that it goes on is not said again."""

    def first_update(self, step: int, minibatch: Minibatch, loss: LossSpec, weight_version: int) -> TrainStepResult:
        """A step's first update; RefitError, and nothing changed, where its figure is above `end_above`."""
        if GENERATION_LOGPROBS not in minibatch.batch.token_columns or not self.trainer.can_refuse:
            return self.trainer.train_step(minibatch, loss, weight_version)
        try:
            return self.trainer.train_step(minibatch, loss, weight_version, {METRIC: self._bound})
        except BoundError as error:
            if METRIC not in error.metrics:
                raise
            self._report(step, minibatch, error.metrics[METRIC], weight_version, refused=True)
        return self.trainer.train_step(minibatch, loss, weight_version, {METRIC: self.end_above})

    def after_first_update(self, step: int, minibatch: Minibatch, result: TrainStepResult) -> None:
        """Judge the update of a trainer that cannot refuse: RefitError where its figure is above `end_above`."""
        found = result.metrics.get(METRIC)
        if found is None or GENERATION_LOGPROBS not in minibatch.batch.token_columns:
            return
        if not self.trainer.can_refuse and found > self._bound:
            self._report(step, minibatch, found, result.weight_version, refused=False)
        self.warned = found > self.warn_above

    @property
    def _bound(self) -> float:
        return self.end_above if self.warned else min(self.warn_above, self.end_above)

    def _report(self, step: int, minibatch: Minibatch, found: float, weight_version: int, *, refused: bool) -> None:
        """Write the worst samples; end the run, or note it."""
        ends = found > self.end_above
        key, bound = ("max", self.end_above) if ends else ("warn", self.warn_above)
        heading = (
            f"step {step}: generator and trainer disagree on the sampled tokens: {METRIC} is {found:.4g}; "
            f"expected at most {bound:g} (training.{key}_{METRIC})"
        )
        batch, sequences = minibatch.batch, minibatch.sequences
        logprobs = self.trainer.logprobs(batch, sequences, "policy", weight_version)
        own = take_rows(logprobs, batch.offsets, sequences)
        worst = WorstSamples.of(batch.select(sequences), own, weight_version)
        weights = "before the update, those that generated" if refused else "after the update: this trainer cannot refuse one"
        remark = f"The trainer's log-probabilities are those of weight version {weight_version}, {weights}."
        try:
            path = self.writer.save_disagreement(step, f"{heading}.\n{remark}", worst)
            kept = f"The worst samples are in {path} and, to read, in {path.with_suffix('.txt').name}."
        except StorageError as error:
            kept = f"Its worst samples could not be kept: {error}"
        message = f"{heading}. Worst token: {worst.describe_worst_token()}. {kept} {DOCUMENT} says how to find the cause."
        if ends:
            outcome = "The update was refused and changed nothing." if refused else "The step is not saved."
            raise RefitError(f"{message} {outcome}")
        self.progress.note(f"{message} The run goes on; it is not said again while this lasts.")

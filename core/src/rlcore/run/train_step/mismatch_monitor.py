"""Whether generator and trainer agree: a step's first update is held to bounds, and the samples that break them are kept."""

from pathlib import Path
from typing import Protocol

from attrs import define, field

from rlcore.run.protocols import Minibatch, TrainerGroup
from rlcore.run.report.progress import Progress
from rlcore.run.train_step.mismatch import WorstSamples
from rlcore.spi import (
    GENERATION_LOGPROBS,
    BoundError,
    LossSpec,
    RefitError,
    StorageError,
    TrainStepResult,
)
from rlcore.spi.arrays import Float32Array, take_rows

METRIC = "token_mult_prob_error"
DOCUMENT = "docs/train-inference-agreement.md"


class DisagreementWriter(Protocol):
    """Keeps the samples on which the two disagree most."""

    def save_disagreement(self, step: int, heading: str, worst: WorstSamples) -> Path:
        """Write a step's worst samples; the path of the table."""


@define(kw_only=True, eq=False)
class MismatchMonitor:
    """Watches METRIC in each step's first update, the only one that finds the weights that generated.

    A trainer that takes bounds refuses the update before anything changes where it lies above `end_above`, and the run ends.
    Above `warn_above` the update is made, the worst samples are written, and a note says so; a trainer that returns the
    log-probabilities of its step returns those that they are found by. Other trainers are judged by the figure that they
    return, and the log-probabilities written are those after the update.
    """

    trainer: TrainerGroup
    writer: DisagreementWriter
    progress: Progress
    warn_above: float
    end_above: float
    warned: bool = False
    """Whether the last update lay above `warn_above`: that it goes on is not said again."""
    _logprobs: Float32Array | None = field(default=None, init=False)
    """float32 [T], of the update that is under way."""

    def first_update(self, step: int, minibatch: Minibatch, loss: LossSpec, weight_version: int) -> TrainStepResult:
        """A step's first update; RefitError, and nothing changed, where its figure is above `end_above`."""
        self._logprobs = None
        if GENERATION_LOGPROBS not in minibatch.batch.token_columns:
            return self.trainer.train_step(minibatch, loss, weight_version)
        bounds = {METRIC: self.end_above} if self.trainer.can_refuse else None
        try:
            if not self.trainer.returns_logprobs or not self._may_warn:
                return self.trainer.train_step(minibatch, loss, weight_version, bounds)
            result, self._logprobs = self.trainer.train_step_with_logprobs(minibatch, loss, weight_version, bounds)
            return result
        except BoundError as error:
            if METRIC not in error.metrics:
                raise
            self._report(step, minibatch, error.metrics[METRIC], weight_version, refused=True)
            raise

    def after_first_update(self, step: int, minibatch: Minibatch, result: TrainStepResult) -> None:
        """Judge the update that was made: RefitError where its figure is above `end_above`, as that of a trainer that cannot
        refuse may be; else a note where that is due."""
        found = result.metrics.get(METRIC)
        if found is None or GENERATION_LOGPROBS not in minibatch.batch.token_columns:
            return
        if found > self.end_above or (self._may_warn and found > self.warn_above):
            version = result.weight_version - (self._logprobs is not None)
            self._report(step, minibatch, found, version, refused=False)
        self.warned = found > self.warn_above
        self._logprobs = None

    @property
    def _may_warn(self) -> bool:
        return not self.warned and self.warn_above < self.end_above

    def _report(self, step: int, minibatch: Minibatch, found: float, weight_version: int, *, refused: bool) -> None:
        """Write the worst samples, by the log-probabilities of the update or else at the weights held, which are of that
        version; end the run, or note it."""
        ends = found > self.end_above
        key, bound = ("max", self.end_above) if ends else ("warn", self.warn_above)
        heading = (
            f"step {step}: generator and trainer disagree on the sampled tokens: {METRIC} is {found:.4g}; "
            f"expected at most {bound:g} (training.{key}_{METRIC})"
        )
        batch, sequences = minibatch.batch, minibatch.sequences
        before = refused or self._logprobs is not None
        logprobs = self._logprobs
        if logprobs is None:
            logprobs = self.trainer.logprobs(batch, sequences, "policy", weight_version)
        own = take_rows(logprobs, batch.offsets, sequences)
        worst = WorstSamples.of(batch.select(sequences), own, weight_version)
        weights = (
            "before the update, those that generated" if before else "after the update: this trainer returns none before it"
        )
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

"""Compares log-probabilities of generator and trainer: bounds on a step's first update, and samples that exceed them."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from attrs import define, evolve

from rlcore import spi
from rlcore.published_plugins import how_to_install
from rlcore.run.report.progress import Progress
from rlcore.spi import GENERATION_LOGPROBS, MISMATCH_METRICS, TokenBatch
from rlcore.spi.arrays import Float32Array, Int64Array, take_rows
from rlcore.spi.execution import Minibatch, TrainerGroup

MAX_DIFFERENCE = 50.0


def mismatch_metrics(batch: TokenBatch, sequences: Int64Array, trainer_logprobs: Float32Array) -> dict[str, float]:
    """MISMATCH_METRICS over the loss tokens of some of a batch's sequences, of which the trainer found `trainer_logprobs`,
    float32 [T]; and how many tokens these are, as `async/tokens_compared`. The formulas are those of
    rlcore_torchkit.trainer.losses, with the same cap."""
    mask = take_rows(batch.loss_mask, batch.offsets, sequences)
    generation, trainer = (
        take_rows(column, batch.offsets, sequences)[mask].astype(np.float64)
        for column in (batch.token_columns[GENERATION_LOGPROBS], trainer_logprobs)
    )
    delta = np.clip(trainer - generation, -MAX_DIFFERENCE, MAX_DIFFERENCE)
    figures = np.exp(np.abs(delta)).mean(), (np.expm1(delta) - delta).mean(), np.exp(delta).mean()
    return {**dict(zip(MISMATCH_METRICS, map(float, figures), strict=True)), "async/tokens_compared": float(len(delta))}


METRIC = "token_mult_prob_error"
DOCUMENT = "docs/train-inference-agreement.md"
MIN_COMPARED = 256
"""Tokens of the present weights below which a step with older ones is not judged: a mean of fewer exponentials says little."""


@runtime_checkable
class DisagreementWriter(Protocol):
    """An observer that keeps the samples on which the two disagree most."""

    def save_logprob_mismatch(
        self, step: int, heading: str, batch: spi.TokenBatch, trainer_logprobs: Float32Array, trainer_version: int
    ) -> str:
        """Write the worst samples of a batch, whose log-probabilities in the trainer at that version are `trainer_logprobs`
        float32 [T]; what a message says of them. StorageError where they cannot be written."""


@define(kw_only=True, eq=False)
class MismatchMonitor:
    """Judges METRIC in the results of each step's first update, the only one that finds the weights that generated.

    A trainer that takes `bounds` refuses the update before anything changes where it lies above `end_above`, and the run ends.
    Above `warn_above` the update is made, the worst samples are written, and a note says so; a trainer that returns the
    log-probabilities of its step returns those that they are found by. Other trainers are judged by the figure that they
    return, and the log-probabilities written are those after the update.
    """

    trainer: TrainerGroup
    """The trainer whose capabilities decide, and whose log-probabilities are read where an update brings none."""
    writer: DisagreementWriter | None
    """None where no installed package keeps samples."""
    progress: Progress
    warn_above: float
    end_above: float
    warned: bool = False
    """True where the last update lay above `warn_above`: that it goes on is not said again."""
    noted_uncompared: bool = False
    """True where a note has said that samples cannot be compared."""

    @property
    def bounds(self) -> Mapping[str, float]:
        """Return the bounds of a step's first update: none where the trainer cannot refuse."""
        return {METRIC: self.end_above} if self.trainer.has(spi.capabilities.METRIC_BOUNDS) else {}

    @property
    def wants_logprobs(self) -> bool:
        """Return whether a step's first update is to return its log-probabilities."""
        return self._may_warn and self.trainer.has(spi.capabilities.STEP_LOGPROBS)

    def comparable(self, minibatch: Minibatch, weight_version: int) -> Minibatch | None:
        """A step's first minibatch with those loss tokens alone that weights of that version generated. None, and the first
        time a note, where there are too few.

        A token that an algorithm added to the loss, such as a prompt's, has no generation log-probability, and one of older
        weights has theirs. Where there are such tokens, the trainer has to return log-probabilities, from which the others'
        figures are computed here.
        """
        batch, sequences = minibatch.batch, minibatch.sequences
        missing = [name for name in (spi.GENERATION_LOGPROBS, spi.WEIGHT_VERSIONS) if name not in batch.token_columns]
        if missing:
            self._note_uncompared(f"the training batch lacks {' and '.join(missing)}")
            return None
        present = batch.loss_mask & (batch.token_columns[spi.WEIGHT_VERSIONS] == weight_version)
        if np.array_equal(present, batch.loss_mask):
            return minibatch
        num_present = int(np.add.reduceat(present, batch.offsets[:-1], dtype=np.int64)[sequences].sum())
        if num_present >= MIN_COMPARED and self.trainer.has(spi.capabilities.STEP_LOGPROBS):
            return evolve(minibatch, batch=evolve(batch, loss_mask=present))
        num_other = np.count_nonzero(batch.loss_mask & ~present)
        self._note_uncompared(f"{num_other} loss tokens were not generated at weight version {weight_version}")
        return None

    def judge_refusal(self, step: int, minibatch: Minibatch, weight_version: int, error: spi.BoundError) -> None:
        """Judge a refused update, which changed nothing: BoundError where METRIC is the reason."""
        if METRIC in error.metrics:
            self._report(step, minibatch, error.metrics[METRIC], weight_version, None, refused=True)

    def compare(self, step: int, minibatch: Minibatch, weight_version: int, *, is_part: bool) -> Mapping[str, float]:
        """Measure how far the two agree on a minibatch before its update, or on a part of it, by a pass of its own:
        MISMATCH_METRICS, and of a part how much it is. BoundError where METRIC is above `end_above`; else a note where that is
        due."""
        logprobs = self.trainer.logprobs(minibatch.batch, minibatch.sequences, "policy", weight_version)
        metrics = mismatch_metrics(minibatch.batch, minibatch.sequences, logprobs)
        if self._is_reported(metrics[METRIC]):
            self._report(step, minibatch, metrics[METRIC], weight_version, logprobs, refused=True)
        self.warned = metrics[METRIC] > self.warn_above
        return {name: value for name, value in metrics.items() if is_part or name in spi.MISMATCH_METRICS}

    def judge(self, step: int, minibatch: Minibatch, result: spi.TrainStepResult, logprobs: Float32Array | None) -> None:
        """Judge an update that was made, with its log-probabilities float32 [T] where it returned them: BoundError where its
        figure is above `end_above`, as that of a trainer that cannot refuse may be; else a note where that is due."""
        found = result.metrics[METRIC]
        if self._is_reported(found):
            version = result.weight_version - (logprobs is not None)
            self._report(step, minibatch, found, version, logprobs, refused=False)
        self.warned = found > self.warn_above

    def _note_uncompared(self, reason: str) -> None:
        if not self.noted_uncompared:
            self.noted_uncompared = True
            self.progress.note(f"generator and trainer are not compared in steps like this one: {reason}; see {DOCUMENT}")

    def _is_reported(self, found: float) -> bool:
        return found > self.end_above or (self._may_warn and found > self.warn_above)

    @property
    def _may_warn(self) -> bool:
        return not self.warned and self.warn_above < self.end_above

    def _keep(self, step: int, text: str, batch: spi.TokenBatch, logprobs: Float32Array, weight_version: int) -> str:
        """Write the worst samples of a batch; what they are and where, in words."""
        if self.writer is None:
            return f"Nothing keeps the worst samples in this run ({how_to_install('loop_observer', 'logprob_mismatch', ())})."
        try:
            return self.writer.save_logprob_mismatch(step, text, batch, logprobs, weight_version)
        except spi.StorageError as error:
            return f"Its worst samples could not be kept: {error}"

    def _report(
        self,
        step: int,
        minibatch: Minibatch,
        found: float,
        weight_version: int,
        logprobs: Float32Array | None,
        *,
        refused: bool,
    ) -> None:
        """Write the worst samples, by the log-probabilities of the update or else at the weights held, which are of that
        version; end the run, or note it."""
        ends = found > self.end_above
        key, bound = ("max", self.end_above) if ends else ("warn", self.warn_above)
        heading = (
            f"step {step}: generator and trainer disagree on the sampled tokens: {METRIC} is {found:.4g}; "
            f"expected at most {bound:g} (training.{key}_{METRIC})"
        )
        batch, sequences = minibatch.batch, minibatch.sequences
        before = refused or logprobs is not None
        if logprobs is None:
            logprobs = self.trainer.logprobs(batch, sequences, "policy", weight_version)
        compared = take_rows(logprobs, batch.offsets, sequences)
        weights = (
            "before the update, those that generated" if before else "after the update: this trainer returns none before it"
        )
        remark = f"The trainer's log-probabilities are those of weight version {weight_version}, {weights}."
        kept = self._keep(step, f"{heading}.\n{remark}", batch.select(sequences), compared, weight_version)
        message = f"{heading}. {kept} {DOCUMENT} says how to find the cause."
        if ends:
            outcome = "The update was refused and changed nothing." if refused else "The step is not saved."
            raise spi.BoundError(f"{message} {outcome}", {METRIC: found})
        self.progress.note(f"{message} The run goes on; it is not said again while this lasts.")

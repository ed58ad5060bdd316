"""The policy's updates of a step, and what each of them is given."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import define, evolve

from rlcore import spi
from rlcore.registry.algorithm_handle import AlgorithmHandle
from rlcore.run.protocols import LoopPosition
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.metrics import training_metrics
from rlcore.run.train_step.mismatch_monitor import MismatchMonitor, mismatch_metrics
from rlcore.run.train_step.scorers import Reference
from rlcore.spi.arrays import Float32Array, Int64Array
from rlcore.spi.execution import LogprobsColumn, Minibatch, TrainerGroup

OnLogprobs = Callable[[Int64Array, Float32Array], None]
"""Called with an update's sequences among the batch's, int64 [M], and float32 [T]: what each token's log-probability was before
it, 0.0 in the other sequences."""


@define(kw_only=True, eq=False)
class PolicyLearner:
    """Trains the policy on each minibatch of a step, after the critic's first steps."""

    trainer: TrainerGroup
    algorithm: AlgorithmHandle
    reference: Reference
    monitor: MismatchMonitor
    clock: PhaseClock
    has_dropout: bool
    """True where a train step's own log-probabilities are those of a policy with dropout, which nothing samples from."""
    samples_truncated: bool
    """True where tokens are sampled from fewer than all, such as with top_p."""
    num_warmup_steps: int = 0
    """First steps that train the critic alone."""
    on_logprobs: OnLogprobs | None = None
    """Called with each update's log-probabilities, which the trainer then has to return."""

    def train(
        self, step: int, minibatches: Sequence[Minibatch], training: spi.TrainingBatch, position: LoopPosition
    ) -> Mapping[str, float]:
        """See Learner."""
        if step <= self.num_warmup_steps:
            return {}
        (first, loss), *later = self._with_logprobs(minibatches, training.loss, position.weight_version)
        compared: Minibatch | None = None
        is_one_distribution = not self.samples_truncated or first.batch.sampling_mask is not None
        if self.algorithm.needs.source == "rollouts" and is_one_distribution:
            # The first update sees the weights that generated.
            compared = self.monitor.comparable(first, position.weight_version)
        found: Mapping[str, float] = {}
        if compared is not None and self.has_dropout:
            with self.clock.phase("logprobs"):
                found = self.monitor.compare(step, compared, position.weight_version, is_part=compared is not first)
            compared = None
        result = self._train_step(step, first, loss, compared, position)
        results = [evolve(result, metrics={**result.metrics, **found})]
        results += [self._train_step(step, minibatch, loss, None, position) for minibatch, loss in later]
        return training_metrics(results)

    def _train_step(
        self, step: int, minibatch: Minibatch, loss: spi.LossSpec, compared: Minibatch | None, position: LoopPosition
    ) -> spi.TrainStepResult:
        """One update. BoundError where generator and trainer turn out to be too far apart on `compared`: the minibatch itself,
        or one with some of its loss tokens alone."""
        version, monitor = position.weight_version, self.monitor
        bounds: Mapping[str, float] = {}
        wants_logprobs = compared is not None or self.on_logprobs is not None
        if compared is minibatch:
            columns = tuple(dict.fromkeys([*loss.token_columns, spi.GENERATION_LOGPROBS]))
            loss = evolve(loss, token_columns=columns, generation_mismatch=True)
            bounds, wants_logprobs = monitor.bounds, monitor.wants_logprobs
        try:
            with self.clock.phase("train"):
                result, logprobs = self.trainer.train_step(minibatch, loss, version, bounds=bounds, logprobs=wants_logprobs)
        except spi.BoundError as error:
            monitor.judge_refusal(step, minibatch, version, error)
            raise
        position.weight_version = result.weight_version
        if self.on_logprobs is not None and logprobs is not None:
            self.on_logprobs(minibatch.sequences, logprobs)
        if compared is not None:
            if compared is not minibatch and logprobs is not None:
                found = mismatch_metrics(compared.batch, compared.sequences, logprobs)
                result = evolve(result, metrics={**result.metrics, **found})
            monitor.judge(step, compared, result, logprobs)
        return result

    def _with_logprobs(
        self, minibatches: Sequence[Minibatch], loss: spi.LossSpec, version: int
    ) -> list[tuple[Minibatch, spi.LossSpec]]:
        """Each minibatch and the loss on it, with the trainer's log-probabilities that the algorithm needs."""
        needs = self.algorithm.needs
        batch, columns, wanted = minibatches[0].batch, list(loss.token_columns), list[LogprobsColumn]()
        if needs.reference_logprobs and not needs.reference_logprobs_in_rollouts:
            columns.append(spi.REFERENCE_LOGPROBS)
            if self.reference.is_beside(self.trainer):
                wanted.append(LogprobsColumn(name=spi.REFERENCE_LOGPROBS, model="reference"))
            else:
                with self.clock.phase("logprobs"):
                    batch = batch.with_token_column(spi.REFERENCE_LOGPROBS, self.reference.of_batch(batch, version))
        first = later = evolve(loss, token_columns=tuple(dict.fromkeys(columns)))
        num_own = 0 if self.has_dropout else 1
        if num_own and needs.head == "tokens" and self.trainer.has(spi.capabilities.PREVIOUS_LOGPROBS):
            # The first update's own forward pass sees the very weights that are meant.
            first = evolve(first, previous_logprobs="unchanged")
        if needs.previous_logprobs and len(minibatches) > num_own:
            wanted.append(LogprobsColumn(name=spi.PREVIOUS_LOGPROBS, model="policy", first=num_own))
            columns.append(spi.PREVIOUS_LOGPROBS)
            later = evolve(loss, token_columns=tuple(dict.fromkeys(columns)), previous_logprobs="given")
        every = np.concatenate([one.sequences for one in minibatches])
        if wanted and len(once := np.unique(every)) < len(every):  # epochs share what is computed once
            with self.clock.phase("logprobs"):
                for one in wanted:
                    batch = batch.with_token_column(one.name, self.trainer.logprobs(batch, once, one.model, version))
            wanted = []
        again = [evolve(minibatch, batch=batch) for minibatch in minibatches]
        if wanted:
            with self.clock.phase("logprobs"):
                again = self.trainer.with_logprobs(again, wanted, columns, version)
        return [(minibatch, later if number >= num_own else first) for number, minibatch in enumerate(again)]

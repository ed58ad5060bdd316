"""The trainer of a run in one process: whole batches in, whole results out."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from attrs import evolve, frozen

from rlcore.registry.handles import TrainerHandle
from rlcore.run.execution.in_process_group import InProcessGroup
from rlcore.run.protocols import Minibatch
from rlcore.run.train_step.microbatches import plan_microbatches
from rlcore.spi import (
    ROUTED_EXPERTS,
    LogprobsRequest,
    LossSpec,
    TokenBatch,
    TrainStepRequest,
    TrainStepResult,
    capabilities,
)
from rlcore.spi.arrays import Float32Array, Int64Array, put_rows


@frozen(kw_only=True, eq=False)
class InProcessTrainer(InProcessGroup[TrainerHandle]):
    """One trainer worker in the driver's own process."""

    max_tokens_per_microbatch: int
    temperature: float

    def train_step(
        self, minibatch: Minibatch, loss: LossSpec, weight_version: int, *, bounds: Mapping[str, float], logprobs: bool
    ) -> tuple[TrainStepResult, Float32Array | None]:
        """One optimizer step on the minibatch, and its log-probabilities where asked for."""
        batch = columns_for(minibatch.batch, loss)
        plan = self._plan(batch, minibatch.sequences)
        request = TrainStepRequest(
            microbatches=tuple(batch.select(sequences) for sequences in plan),
            counts=minibatch.counts,
            loss=loss,
            temperature=self.temperature,
            weight_version=weight_version,
            bounds=bounds,
            schedule_step=minibatch.schedule_step if self.handle.has(capabilities.SCHEDULE_STEP) else weight_version,
            logprobs=logprobs,
        )
        result = self.handle.train_step(request)
        if result.logprobs is None:
            return result, None
        return result, put_rows(result.logprobs, batch.offsets, np.concatenate(plan))

    def logprobs(
        self, batch: TokenBatch, sequences: Int64Array, model: Literal["policy", "reference"], weight_version: int
    ) -> Float32Array:
        """float32 [T]: of every token of some of the batch's sequences, and 0.0 in the others."""
        bare = without_columns(batch, model)
        plan = self._plan(bare, sequences)
        request = LogprobsRequest(
            microbatches=tuple(bare.select(microbatch) for microbatch in plan),
            model=model,
            temperature=self.temperature,
            entropy=False,
            weight_version=weight_version,
        )
        result = self.handle.get_logprobs(request)
        return put_rows(result.logprobs, bare.offsets, np.concatenate(plan))

    def _plan(self, batch: TokenBatch, sequences: Int64Array) -> list[Int64Array]:
        plan = plan_microbatches(batch.lengths[sequences], max_tokens=self.max_tokens_per_microbatch)
        return [sequences[microbatch] for microbatch in plan]


def columns_for(batch: TokenBatch, loss: LossSpec) -> TokenBatch:
    """The batch with the per-token columns alone that a training step may read."""
    return _with_columns(batch, {*loss.token_columns, ROUTED_EXPERTS})


def without_columns(batch: TokenBatch, model: Literal["policy", "reference"]) -> TokenBatch:
    """The batch with what a model's log-probabilities depend on alone."""
    return evolve(_with_columns(batch, {ROUTED_EXPERTS} if model == "policy" else set()), sequence_columns={})


def _with_columns(batch: TokenBatch, kept: set[str]) -> TokenBatch:
    return evolve(batch, token_columns={name: column for name, column in batch.token_columns.items() if name in kept})

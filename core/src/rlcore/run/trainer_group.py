"""The trainer of a run in one process: whole batches in, whole results out."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from attrs import evolve, frozen

from rlcore.plugins.handles import TrainerHandle
from rlcore.run.packing import plan_microbatches
from rlcore.spi import (
    PREVIOUS_LOGPROBS,
    REFERENCE_LOGPROBS,
    LoadStateRequest,
    LoadStateResult,
    LogprobsRequest,
    LossSpec,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
    TokenBatch,
    TrainStepRequest,
    TrainStepResult,
    capabilities,
)
from rlcore.spi.arrays import Float32Array, Int64Array, gather_ragged


@frozen(kw_only=True, eq=False)
class InProcessTrainer:
    """One trainer worker in the driver's own process."""

    handle: TrainerHandle
    max_tokens_per_microbatch: int
    temperature: float

    @property
    def can_refuse(self) -> bool:
        """Whether `train_step` takes bounds."""
        return self.handle.has(capabilities.METRIC_BOUNDS)

    @property
    def is_usable(self) -> bool:
        """Whether it is open and in a known state."""
        return self.handle.is_usable

    def has(self, capability: str) -> bool:
        """Whether the provider declares a capability."""
        return self.handle.has(capability)

    def train_step(
        self, batch: TokenBatch, loss: LossSpec, weight_version: int, bounds: Mapping[str, float] | None = None
    ) -> TrainStepResult:
        """One optimizer step on the whole batch, which holds at least one loss token. BoundError, and nothing changed, where a
        metric exceeds its bound."""
        batch = columns_for(batch, loss)
        request = TrainStepRequest(
            microbatches=tuple(batch.select(indices) for indices in self._plan(batch)),
            counts=batch.counts(),
            loss=loss,
            temperature=self.temperature,
            weight_version=weight_version,
            bounds=bounds or {},
        )
        return self.handle.train_step(request)

    def logprobs(self, batch: TokenBatch, model: Literal["policy", "reference"], weight_version: int) -> Float32Array:
        """float32 [T]: of every token of the batch, in its order."""
        bare = evolve(batch, token_columns={}, sequence_columns={})
        plan = self._plan(bare)
        request = LogprobsRequest(
            microbatches=tuple(bare.select(indices) for indices in plan),
            model=model,
            temperature=self.temperature,
            entropy=False,
            weight_version=weight_version,
        )
        result = self.handle.get_logprobs(request)
        logprobs = np.empty(bare.num_tokens, np.float32)
        for indices, part in zip(plan, result.logprobs, strict=True):
            logprobs[gather_ragged(bare.offsets, indices)[0]] = part
        return logprobs

    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move what the trainer holds."""
        return self.handle.set_residency(request)

    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        """Write the state."""
        return self.handle.save_state(request)

    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        """Restore a state."""
        return self.handle.load_state(request)

    def _plan(self, batch: TokenBatch) -> list[Int64Array]:
        return plan_microbatches(batch.lengths, max_tokens=self.max_tokens_per_microbatch)


def columns_for(batch: TokenBatch, loss: LossSpec) -> TokenBatch:
    """The batch with the per-token columns alone that a loss may read."""
    kept = {*loss.token_columns, PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS}
    return evolve(batch, token_columns={name: column for name, column in batch.token_columns.items() if name in kept})

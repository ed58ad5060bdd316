"""Trainer and generator as the run sees them: one object each, whatever number of processes stands behind it."""

from collections.abc import Mapping
from typing import Literal, Protocol

from attrs import frozen

from rlcore.run.minibatch import Minibatch
from rlcore.run.responses import Responses
from rlcore.spi import (
    DtypeName,
    ExportWeightsRequest,
    GenerateRequest,
    LoadStateRequest,
    LoadStateResult,
    LossSpec,
    RefitChannel,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
    TokenBatch,
    TrainStepResult,
)
from rlcore.spi.arrays import Float32Array, Int64Array


class Group(Protocol):
    """What trainers and generators have in common."""

    @property
    def is_usable(self) -> bool:
        """Whether all of it is open and in a known state."""

    def has(self, capability: str) -> bool:
        """Whether the provider declares a capability."""

    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move what it holds; the bytes are those of the rank that keeps most."""

    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        """Write its state, each rank its part."""

    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        """Restore a state on every rank."""


class TrainerGroup(Group, Protocol):
    """All ranks of the trainer: whole batches in, whole results out."""

    @property
    def can_refuse(self) -> bool:
        """Whether `train_step` takes bounds."""

    def train_step(
        self, minibatch: Minibatch, loss: LossSpec, weight_version: int, bounds: Mapping[str, float] | None = None
    ) -> TrainStepResult:
        """One optimizer step on the minibatch, which holds at least one loss token. BoundError, and nothing changed, where a
        metric exceeds its bound."""

    @property
    def returns_logprobs(self) -> bool:
        """Whether there is `train_step_with_logprobs`."""

    def train_step_with_logprobs(
        self, minibatch: Minibatch, loss: LossSpec, weight_version: int, bounds: Mapping[str, float] | None = None
    ) -> tuple[TrainStepResult, Float32Array]:
        """`train_step`, and what `logprobs` would have returned for the policy and the minibatch's sequences before it."""

    def logprobs(
        self, batch: TokenBatch, sequences: Int64Array, model: Literal["policy", "reference"], weight_version: int
    ) -> Float32Array:
        """float32 [T]: of every token of some of the batch's sequences, and 0.0 in the others."""


class GeneratorGroup(Group, Protocol):
    """All generators."""

    def generate(self, request: GenerateRequest) -> Responses:
        """Sample responses, wherever."""


class WeightRoute(Protocol):
    """The way from trainer to generator."""

    def hand_over(self, order: "RefitOrder") -> None:
        """One attempt. Raises RefitError or WorkerError where a generator does not hold what the trainer exported."""


@frozen(kw_only=True)
class RefitOrder:
    """What is to be handed over, and how."""

    export: ExportWeightsRequest
    channel: RefitChannel

    @classmethod
    def of(cls, weight_version: int, dtype: DtypeName, max_bucket_bytes: int, channel: RefitChannel) -> "RefitOrder":
        """The order for a version of the weights."""
        export = ExportWeightsRequest(weight_version=weight_version, dtype=dtype, max_bucket_bytes=max_bucket_bytes)
        return cls(export=export, channel=channel)


@frozen(kw_only=True, eq=False)
class Backends:
    """What runs a recipe's trainer and generator."""

    trainer: TrainerGroup
    generator: GeneratorGroup | None
    route: WeightRoute | None
    """None where nothing generates."""

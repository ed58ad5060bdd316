"""A bundle: the data of one training step, in the order in which the step computes it.

Shapes: N sequences of T tokens in G groups, as in RolloutBatch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from attrs import field, frozen

from rlcore.run.protocols import CollectedRollouts
from rlcore.schema.constraints import above
from rlcore.spi import TokenBatch
from rlcore.spi.arrays import AnyArray, Float32Array, Int64Array

Prompts: TypeAlias = Literal["kept", "hashed", "left out"]
"""Form of the prompts: as they are; the SHA-256 of each row; or nothing. Without them their tokens are 0."""
Weights: TypeAlias = Literal["none", "model", "state"]
"""Weights at the beginning of the step: none; the model; or the model and the trainer's state."""


@frozen(kw_only=True, eq=False)
class Update:
    """One optimizer step."""

    sequences: Int64Array
    """int64 [M], ascending: the minibatch among the sequences of the training batch."""
    num_loss_tokens: int
    num_loss_sequences: int
    schedule_step: int
    loss: str
    """The loss function, `package.module:function`."""
    loss_config: Mapping[str, Any]
    """The constants of the loss."""
    columns: Mapping[str, Float32Array] = field(factory=dict)
    """float32 [T] each: log-probabilities that the loss reads, 0.0 in other sequences."""
    logprobs: Float32Array | None = None
    """float32 [T]: log-probabilities before the update; None where the trainer returns none."""
    loss_value: float
    grad_norm: float
    learning_rate: float
    metrics: Mapping[str, float]
    gradient_norms: Mapping[str, float] | None = None
    """Norm of each tensor's gradient before clipping, by the tensor's name; None where the trainer returns none."""


@frozen(kw_only=True)
class StepSettings:
    """Settings of a session's optim_step in place of those of [optimizer] and [schedule]; None where it had none."""

    learning_rate: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None


@frozen(kw_only=True)
class OwnStep:
    """The arguments of a session's forward_backward and optim_step, where a program's own loop made the step."""

    temperature: Annotated[float, above(0)]
    token_columns: tuple[str, ...]
    """The columns that the loss reads."""
    previous_logprobs: Literal["unchanged", "given", "absent"]
    """See LossSpec."""
    settings: StepSettings = StepSettings()


@frozen(kw_only=True, eq=False)
class Bundle:
    """One training step."""

    step: int
    weight_version: int
    """The version of the weights at the beginning of the step."""
    recipe: str
    """The recipe as it ran, as TOML, without secrets."""
    environment: Mapping[str, Any]
    """Versions and devices, as environment.json of a run holds them, and the kind of device and the dtype of the trainer."""
    alarm: str = ""
    """The cause, where an alarm wrote the bundle."""
    prompts: Prompts = "kept"
    row_hashes: Sequence[str] = ()
    """[G]: SHA-256 of each row's JSON, where the prompts are hashed."""
    sampled: CollectedRollouts
    scored: Mapping[str, AnyArray]
    """Token columns that were added to the samples, or changed, before the algorithm read them."""
    trained: TokenBatch
    """The training batch."""
    updates: Sequence[Update]
    digests_before: Mapping[str, int] = field(factory=dict)
    """The digest of each tensor before the step, by name; empty where they are not known."""
    digests_after: Mapping[str, int] = field(factory=dict)
    metrics: Mapping[str, float] = field(factory=dict)
    """The step's line of metrics.jsonl."""
    weights: Weights = "none"
    own_step: OwnStep | None = None
    """The calls of a session that made the step. Its samples are the training batch, without rewards. None in a run's step."""
    directory: Path | None = None
    """The folder of a bundle that was read: the model is in `model/`, the trainer's state in `state/`."""

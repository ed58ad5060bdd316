"""Trainer and route of a run whose calls are noted."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from attrs import define, field, frozen

from rlcore.run.plan.run_plan import RunPlan, dtype_of
from rlcore.run.protocols import TrainedStep
from rlcore.run.storage.run_directory import describe_environment
from rlcore.spi import LossSpec, TokenBatch, TrainStepResult, capabilities
from rlcore.spi.arrays import AnyArray, BoolArray, Float32Array, Int64Array
from rlcore.spi.execution import LogprobsColumn, Minibatch, RefitCommand, Refitted, TrainerGroup, WeightRoute
from rlcore_bundles.bundle import Update


@define(kw_only=True, eq=False)
class Notes:
    """The notes of the present step."""

    wanted: bool = False
    """True where the present step is written for certain: it may take calls of its own."""
    updates: list[Update] = field(factory=list)
    columns: dict[str, Float32Array] = field(factory=dict)
    """float32 [T] by name: log-probabilities that the losses of the step read."""
    digests_before: Mapping[str, int] = field(factory=dict)
    digests_after: Mapping[str, int] = field(factory=dict)

    def begin(self, *, wanted: bool) -> None:
        """Begin a step."""
        self.wanted, self.updates, self.columns = wanted, [], {}
        self.digests_before, self.digests_after = self.digests_after, {}

    def note_refit(self, version: int, digests: Mapping[str, int]) -> None:  # noqa: ARG002 - a step has one refit
        """Note the digests of the weights that a step ends with."""
        self.digests_after = digests


@frozen(eq=False)
class RecordedTrainer:
    """A trainer whose updates are noted. All other calls are the trainer's own."""

    inner: TrainerGroup
    notes: Notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def with_logprobs(
        self, minibatches: Sequence[Minibatch], columns: Sequence[LogprobsColumn], read: Collection[str], weight_version: int
    ) -> list[Minibatch]:
        """See TrainerGroup. The columns may stay on ranks, so that those of a step which is written are computed once more."""
        if self.notes.wanted:
            for column in columns:
                sequences = np.sort(np.concatenate([one.sequences for one in minibatches[column.first :]]))
                self.notes.columns[column.name] = self.inner.logprobs(
                    minibatches[0].batch, sequences, column.model, weight_version
                )
        return self.inner.with_logprobs(minibatches, columns, read, weight_version)

    def train_step(
        self, minibatch: Minibatch, loss: LossSpec, weight_version: int, *, logprobs: bool, **options: Any
    ) -> tuple[TrainStepResult, Float32Array | None]:
        """See TrainerGroup."""
        wants = logprobs or (self.notes.wanted and self.inner.has(capabilities.STEP_LOGPROBS))
        norms = self.notes.wanted and self.inner.has(capabilities.GRADIENT_NORMS)
        given = {"gradient_norms": True} if norms else {}
        result, found = self.inner.train_step(minibatch, loss, weight_version, logprobs=wants, **options | given)
        batch, notes = minibatch.batch, self.notes
        config: Any = loss.config
        read = {
            name: batch.token_columns[name]
            for name in loss.token_columns
            if name.endswith("logprobs") and name in batch.token_columns
        }
        of_step = {
            name: np.where(tokens_of(batch, minibatch.sequences), column, np.float32(0.0))
            for name, column in notes.columns.items()
            if name in loss.token_columns
        }
        notes.updates.append(
            Update(
                sequences=minibatch.sequences,
                num_loss_tokens=minibatch.counts.num_loss_tokens,
                num_loss_sequences=minibatch.counts.num_loss_sequences,
                schedule_step=minibatch.schedule_step,
                loss=loss.path,
                loss_config=attrs.asdict(config) if attrs.has(type(config)) else {"value": str(config)},
                columns=of_step | {name: one for name, one in read.items() if name != "generation_logprobs"},
                logprobs=found,
                loss_value=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                metrics=dict(result.metrics),
                gradient_norms=result.gradient_norms,
            )
        )
        return result, found if logprobs else None


@frozen(eq=False)
class RecordedRoute:
    """The way of the weights, whose refits are noted once the generator has acknowledged them."""

    inner: WeightRoute
    note: Callable[[int, Mapping[str, int]], None]
    """Called with the version of the weights, and the digest of each tensor."""

    def sync_weights(self, order: RefitCommand) -> Refitted:
        """See WeightRoute."""
        refitted = self.inner.sync_weights(order)
        self.note(order.export.weight_version, refitted.digests)
        return refitted


def environment_of(plan: RunPlan) -> dict[str, object]:
    """Versions and devices, as environment.json holds them, with the trainer's device and dtype."""
    environment = describe_environment([entry.distribution for entry in plan.chosen.values()])
    return environment | {"device": plan.device, "dtype": dtype_of(plan.recipe, plan.device)}


def scored_columns(step: TrainedStep) -> dict[str, AnyArray]:
    """The token columns that scorers added to a step's samples, or changed."""
    before = step.sampled.batch.token_columns
    return {name: column for name, column in step.scored.batch.token_columns.items() if before.get(name) is not column}


def tokens_of(batch: TokenBatch, sequences: Int64Array) -> BoolArray:
    """bool [T]: the tokens of these sequences."""
    is_in = np.zeros(batch.num_sequences, np.bool_)
    is_in[sequences] = True
    return np.repeat(is_in, batch.lengths)

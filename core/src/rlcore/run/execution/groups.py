"""Trainer and generator of a run in one process, as the loop sees them: whole batches in, whole results out."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import numpy as np
from attrs import evolve, frozen

from rlcore import spi
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.registry.handle import BackendHandle
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.run.execution.streams import run_stream
from rlcore.run.train_step.minibatches import group_offsets, plan_microbatches
from rlcore.spi.arrays import Float32Array, Int64Array, put_rows
from rlcore.spi.execution import LogprobsColumn, Minibatch, ResponseFeed, TextDecoder

HandleT = TypeVar("HandleT", bound=BackendHandle)
TokensRequest: TypeAlias = spi.LogprobsRequest | spi.ValuesRequest
"""A request that is answered by one number a token."""
GradientsRequest: TypeAlias = spi.TrainStepRequest | spi.ForwardBackwardRequest
RequestT = TypeVar("RequestT", bound=spi.TrainStepRequest | spi.ForwardBackwardRequest)
GradientsResult: TypeAlias = spi.TrainStepResult | spi.ForwardBackwardResult


def gradients_of(handle: TrainerHandle, request: GradientsRequest) -> GradientsResult:
    """Return the trainer's answer to a request for a whole step, or for a piece of one."""
    return handle.train_step(request) if isinstance(request, spi.TrainStepRequest) else handle.forward_backward(request)


def per_token_results(
    handle: TrainerHandle, request: TokensRequest, microbatches: tuple[spi.TokenBatch, ...]
) -> tuple[Float32Array, ...]:
    """Return the trainer's answer to the request, float32 [T] for each microbatch."""
    if isinstance(request, spi.ValuesRequest):
        return handle.get_values(evolve(request, microbatches=microbatches)).values
    return handle.get_logprobs(evolve(request, microbatches=microbatches)).logprobs


@frozen(kw_only=True, eq=False)
class InProcessGroup(Generic[HandleT]):
    """A group of one backend in this process."""

    handle: HandleT

    @property
    def is_usable(self) -> bool:
        """Return whether it is open and in a known state."""
        return self.handle.is_usable

    def has(self, capability: str) -> bool:
        """Return whether the provider declares a capability."""
        return self.handle.has(capability)

    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Move what the backend holds to the host or to the device."""
        return self.handle.set_residency(request)

    def save_state(self, request: spi.SaveStateRequest) -> spi.SaveStateResult:
        """Write the backend's state."""
        return self.handle.save_state(request)

    def load_state(self, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        """Restore a state that save_state wrote."""
        return self.handle.load_state(request)


class MinibatchTrainer(ABC):
    """Turns the loop's calls into requests without microbatches, and selects the columns that they read."""

    temperature: float
    whole_groups: bool
    """True where the loss compares the sequences of a group, so that a microbatch holds whole groups."""

    @abstractmethod
    def has(self, capability: str) -> bool:
        """Return whether the provider declares a capability."""

    @abstractmethod
    def _train(self, request: GradientsRequest, minibatch: Minibatch) -> tuple[Any, Float32Array | None]:
        """Make the step, or the piece of one, on the minibatch. Return the result, and its log-probabilities [T] where the
        request asks for them."""

    @abstractmethod
    def _evaluate(self, request: TokensRequest, batch: spi.TokenBatch, sequences: Int64Array) -> Float32Array:
        """float32 [T]: the log-probabilities or values of these of the batch's sequences, 0.0 in the others."""

    def _groups(self, batch: spi.TokenBatch, sequences: Int64Array) -> Int64Array | None:
        """int64 [G+1]: where the groups of these sequences begin and end; None where each sequence goes by itself."""
        return group_offsets(batch.sequence_columns[spi.GROUP_IDS][sequences]) if self.whole_groups else None

    def train_step(
        self, minibatch: Minibatch, loss: spi.LossSpec, weight_version: int, **options: Any
    ) -> tuple[spi.TrainStepResult, Float32Array | None]:
        """See TrainerGroup, which lists the options: fields of the request."""
        request = spi.TrainStepRequest(
            **self._common_fields(minibatch, loss, weight_version),
            schedule_step=minibatch.schedule_step if self.has(spi.capabilities.SCHEDULE_STEP) else weight_version,
            **options,
        )
        return self._train(request, minibatch)

    def forward_backward(
        self, minibatch: Minibatch, loss: spi.LossSpec, weight_version: int, *, piece: int, logprobs: bool
    ) -> tuple[spi.ForwardBackwardResult, Float32Array | None]:
        """See TrainerGroup."""
        common = self._common_fields(minibatch, loss, weight_version)
        return self._train(spi.ForwardBackwardRequest(**common, piece=piece, logprobs=logprobs), minibatch)

    def _common_fields(self, minibatch: Minibatch, loss: spi.LossSpec, weight_version: int) -> dict[str, Any]:
        """The fields of GradientsRequest, whose microbatches each rank adds."""
        return {
            "microbatches": (),
            "counts": minibatch.counts,
            "loss": loss,
            "temperature": self.temperature,
            "weight_version": weight_version,
        }

    def at_temperature(self, temperature: float) -> Any:
        """See TrainerGroup. Subclasses are attrs classes."""
        trainer: Any = self
        return evolve(trainer, temperature=temperature)

    def logprobs(
        self, batch: spi.TokenBatch, sequences: Int64Array, model: Literal["policy", "reference"], weight_version: int
    ) -> Float32Array:
        """float32 [T]: of every token of some of the batch's sequences, and 0.0 in the others."""
        request = self._logprobs_request(model, weight_version)
        return self._evaluate(request, without_columns(batch, model), sequences)

    def _logprobs_request(self, model: Literal["policy", "reference"], weight_version: int) -> spi.LogprobsRequest:
        return spi.LogprobsRequest(
            microbatches=(), model=model, temperature=self.temperature, entropy=False, weight_version=weight_version
        )

    def values(self, batch: spi.TokenBatch, sequences: Int64Array, weight_version: int) -> Float32Array:
        """float32 [T]: the values after every token of some of the batch's sequences, and 0.0 in the others."""
        request = spi.ValuesRequest(microbatches=(), weight_version=weight_version)
        bare = evolve(with_columns(batch, set()), sequence_columns={}, sampling_mask=None)
        return self._evaluate(request, bare, sequences)


@frozen(kw_only=True, eq=False)
class CutMinibatch:
    """The microbatches of an update, each a copy of its sequences."""

    sequences: Int64Array
    """int64 [M]: the numbers of all sequences, in the order of the microbatches."""
    microbatches: tuple[spi.TokenBatch, ...]

    def with_column(self, name: str, values: Iterator[Float32Array]) -> "CutMinibatch":
        """Add a token column; `values` returns that of each microbatch in turn."""
        return evolve(self, microbatches=tuple(one.with_token_column(name, next(values)) for one in self.microbatches))


@frozen(kw_only=True, eq=False)
class InProcessTrainer(InProcessGroup[TrainerHandle], MinibatchTrainer):
    """One trainer worker in the driver's own process."""

    max_tokens_per_microbatch: int
    temperature: float
    whole_groups: bool = False

    def with_logprobs(
        self,
        minibatches: Sequence[Minibatch],
        columns: Sequence[LogprobsColumn],
        read: Collection[str],
        weight_version: int,
    ) -> list[Minibatch]:
        """See TrainerGroup. Each minibatch is cut once: its microbatches get the columns, and the update reads them."""
        batch = with_columns(minibatches[0].batch, {*read, spi.GENERATION_LOGPROBS, spi.ROUTED_EXPERTS})
        held = [self._cut(batch, one.sequences, self._groups(batch, one.sequences)) for one in minibatches]
        for column in columns:
            request, later = self._logprobs_request(column.model, weight_version), held[column.first :]
            bare = tuple(without_columns(one, column.model) for cut in later for one in cut.microbatches)
            found = iter(per_token_results(self.handle, request, bare))
            held[column.first :] = [cut.with_column(column.name, found) for cut in later]
        return [evolve(minibatch, held=cut) for minibatch, cut in zip(minibatches, held, strict=True)]

    def optim_step(self, request: spi.OptimStepRequest) -> spi.OptimStepResult:
        """See TrainerGroup."""
        return self.handle.optim_step(request)

    def use_adapter(self, request: spi.UseAdapterRequest) -> spi.UseAdapterResult:
        """See TrainerGroup."""
        return self.handle.use_adapter(request)

    def forward_backward_together(
        self, pieces: Mapping[str, tuple[spi.ForwardBackwardRequest, Minibatch]]
    ) -> dict[str, tuple[spi.ForwardBackwardResult, Float32Array | None]]:
        """See TrainerGroup."""
        cuts = {name: self._cut_of(*piece) for name, piece in pieces.items()}
        requests = {name: _filled(request, cuts[name]) for name, (request, _) in pieces.items()}
        results = self.handle.forward_backward_together(spi.ForwardBackwardTogetherRequest(pieces=requests)).pieces
        return {name: (results[name], _rows(results[name], cuts[name], pieces[name][1])) for name in pieces}

    def _train(self, request: GradientsRequest, minibatch: Minibatch) -> tuple[Any, Float32Array | None]:
        cut = self._cut_of(request, minibatch)
        result = gradients_of(self.handle, _filled(request, cut))
        return result, _rows(result, cut, minibatch)

    def _cut_of(self, request: GradientsRequest, minibatch: Minibatch) -> CutMinibatch:
        if isinstance(minibatch.held, CutMinibatch):
            return minibatch.held
        batch, sequences = minibatch.batch, minibatch.sequences
        return self._cut(read_by(request.loss, batch), sequences, self._groups(batch, sequences))

    def _evaluate(self, request: TokensRequest, batch: spi.TokenBatch, sequences: Int64Array) -> Float32Array:
        cut = self._cut(batch, sequences, None)
        return put_rows(per_token_results(self.handle, request, cut.microbatches), batch.offsets, cut.sequences)

    def _cut(self, batch: spi.TokenBatch, sequences: Int64Array, groups: Int64Array | None) -> CutMinibatch:
        plan = plan_microbatches(batch.lengths[sequences], max_tokens=self.max_tokens_per_microbatch, groups=groups)
        chosen = [sequences[microbatch] for microbatch in plan]
        return CutMinibatch(sequences=np.concatenate(chosen), microbatches=tuple(batch.select(one) for one in chosen))


@frozen(kw_only=True, eq=False)
class InProcessGenerator(InProcessGroup[GeneratorHandle]):
    """One generator in the driver's own process."""

    decoder: TextDecoder
    lacks_weights: ClassVar[bool] = False
    """Its one engine either holds weights, or the generation has failed."""

    def take_restarts(self) -> int:
        """Return 0: the one engine never restarts by itself."""
        return 0

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        """Generate the requests of a feed until it ends."""
        run_stream(self.handle, self.decoder, feed, weight_version)


def _filled(request: RequestT, cut: CutMinibatch) -> RequestT:
    return evolve(request, microbatches=tuple(read_by(request.loss, one) for one in cut.microbatches))


def _rows(result: GradientsResult, cut: CutMinibatch, minibatch: Minibatch) -> Float32Array | None:
    return None if result.logprobs is None else put_rows(result.logprobs, minibatch.batch.offsets, cut.sequences)


def read_by(loss: spi.LossSpec, batch: spi.TokenBatch) -> spi.TokenBatch:
    """Select the columns that an update with this loss reads."""
    return with_columns(batch, {*loss.token_columns, spi.ROUTED_EXPERTS})


def without_columns(batch: spi.TokenBatch, model: Literal["policy", "reference"]) -> spi.TokenBatch:
    """Drop all columns but the policy's ROUTED_EXPERTS: log-probabilities read no other."""
    return evolve(with_columns(batch, {spi.ROUTED_EXPERTS} if model == "policy" else set()), sequence_columns={})


def with_columns(batch: spi.TokenBatch, kept: Collection[str]) -> spi.TokenBatch:
    """Select per-token columns."""
    return evolve(batch, token_columns={name: column for name, column in batch.token_columns.items() if name in kept})

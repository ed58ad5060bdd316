"""The interface of executions, which return to the training loop: trainer, generator and the weights' way between them, each as
one object.

An execution runs them in the driver's process, in threads, in worker processes or on a cluster. Its entry point stands in the
group `rlcore.executions` and names a Provider, whose `backend` is a function or class. The core calls it once for a run as
`backend(context, config)`: `context` is an `rlcore.execution.ExecutionContext`, `config` the section `[cluster]`. The result is
a context manager. The core enters it after the recipe is checked, and leaves it when the run ends. It yields an `OpenBackends`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeAlias

from attrs import field, frozen

from rlcore.spi.arrays import Float32Array, Int32Array, Int64Array
from rlcore.spi.batch import EPISODE_IDS, GlobalCounts, TokenBatch
from rlcore.spi.errors import WorkerError
from rlcore.spi.generator import DraftCounts, GenerateRequest, GenerateResult, RefitRequest
from rlcore.spi.lifecycle import (
    LoadStateRequest,
    LoadStateResult,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
)
from rlcore.spi.loss import LossSpec
from rlcore.spi.trainer import (
    ExportWeightsRequest,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    OptimStepRequest,
    OptimStepResult,
    TrainStepResult,
    UseAdapterRequest,
    UseAdapterResult,
)
from rlcore.spi.weights import Delta, WeightExport


@frozen(kw_only=True, eq=False)
class Minibatch:
    """Sequences by number: their tokens are copied once, where they are cut for the workers."""

    batch: TokenBatch
    """The whole batch of the step."""
    sequences: Int64Array
    """int64 [M], ascending."""
    counts: GlobalCounts
    """The global counts of these sequences."""
    schedule_step: int
    """The number of this update among those that the run plans, from 0."""
    held: object | None = None
    """The trainer's handle of it, where `TrainerGroup.with_logprobs` has sent its data to the ranks."""

    @classmethod
    def of(cls, batch: TokenBatch, sequences: Int64Array, num_loss_tokens: Int64Array, schedule_step: int) -> "Minibatch":
        """Some sequences, given the loss tokens of each of the batch's, int64 [N]."""
        episodes = batch.sequence_columns.get(EPISODE_IDS)
        counts = GlobalCounts.of(num_loss_tokens[sequences], None if episodes is None else episodes[sequences])
        return cls(batch=batch, sequences=sequences, counts=counts, schedule_step=schedule_step)


@frozen(kw_only=True)
class LogprobsColumn:
    """Log-probabilities that the loss of some of a step's updates reads."""

    name: str
    """The token column."""
    model: Literal["policy", "reference"]
    first: int = 0
    """The number of the update from which on they are read."""


class TextDecoder(Protocol):
    """The part of a tokenizer that turns samples into text. It pickles."""

    def decode_batch(self, sequences: Sequence[Sequence[int] | Int32Array]) -> list[str]:
        """Return the text of each list of tokens, without special tokens."""


@frozen(kw_only=True, eq=False)
class Responses:
    """S samples. Their text is made where they are generated: for the driver alone it would be the longest part of a step."""

    result: GenerateResult
    texts: Sequence[str]
    """[S]: decoded, without special tokens."""

    @classmethod
    def of(cls, result: GenerateResult, decoder: TextDecoder) -> "Responses":
        """Return the samples of a result with the text of each."""
        return cls(result=result, texts=decoder.decode_batch(result.sequences()))


class BackendGroup(Protocol):
    """The calls that trainers and generators have in common. One thread calls at a time, but for `GeneratorGroup.stream`."""

    @property
    def is_usable(self) -> bool:
        """Return whether all of it is open and in a known state."""

    def has(self, capability: str) -> bool:
        """Return whether the provider declares a capability."""

    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move what it holds; the bytes are those of the rank that keeps most."""

    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        """Write its state, each rank its part."""

    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        """Restore a state on every rank."""


class TrainerGroup(BackendGroup, Protocol):
    """All ranks of the trainer: whole batches in, whole results out."""

    def at_temperature(self, temperature: float) -> "TrainerGroup":
        """Return the same ranks with another temperature of log-probabilities and losses than that of the recipe."""

    def train_step(
        self,
        minibatch: Minibatch,
        loss: LossSpec,
        weight_version: int,
        *,
        bounds: Mapping[str, float],
        logprobs: bool,
        gradient_norms: bool = False,
    ) -> tuple[TrainStepResult, Float32Array | None]:
        """Make one optimizer step on the minibatch, which holds at least one loss token. With `logprobs`, also return what
        `self.logprobs` would have returned for the policy and these sequences before the step. BoundError, with nothing
        changed, if a metric exceeds its bound. `gradient_norms` is the request's."""

    def forward_backward(
        self, minibatch: Minibatch, loss: LossSpec, weight_version: int, *, piece: int, logprobs: bool
    ) -> tuple[ForwardBackwardResult, Float32Array | None]:
        """Add the gradients of a piece of a step. `minibatch.counts` are those of the whole step; `logprobs` is as in
        train_step. Of trainers with the capability `split_step`."""

    def forward_backward_together(
        self, pieces: Mapping[str, tuple[ForwardBackwardRequest, Minibatch]]
    ) -> dict[str, tuple[ForwardBackwardResult, Float32Array | None]]:
        """Add a piece of a step of each of several adapters, by name: a request without microbatches, and its data. Of trainers
        with the capabilities `many_adapters` and `split_step`."""

    def optim_step(self, request: OptimStepRequest) -> OptimStepResult:
        """Make one optimizer step of the pieces whose gradients every rank holds."""

    def use_adapter(self, request: UseAdapterRequest) -> UseAdapterResult:
        """Change to another adapter on every rank. Of trainers with the capability `many_adapters`."""

    def logprobs(
        self, batch: TokenBatch, sequences: Int64Array, model: Literal["policy", "reference"], weight_version: int
    ) -> Float32Array:
        """float32 [T]: of every token of some of the batch's sequences, and 0.0 in the others."""

    def with_logprobs(
        self, minibatches: Sequence[Minibatch], columns: Sequence[LogprobsColumn], read: Collection[str], weight_version: int
    ) -> list[Minibatch]:
        """Add columns to the minibatches of a step, which share a batch. Each is trained on at most once, in this order. `read`
        are the token columns that the updates read. New columns may stay on the ranks that computed them, unseen by the
        driver."""

    def values(self, batch: TokenBatch, sequences: Int64Array, weight_version: int) -> Float32Array:
        """float32 [T]: the values after every token of some of the batch's sequences, and 0.0 in the others. Of a trainer with
        the head "value" alone."""


class ResponseFeed(Protocol):
    """The queue of a group's stream, which gives requests and takes samples: rlcore.spi.SampleFeed, but for their texts."""

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """Requests that came since the last call; None once the stream is to end. Samples are numbered in the order of being
        taken, and one thread calls it at a time."""

    def deliver(self, samples: Int64Array, responses: Responses) -> None:
        """Hand out samples that have ended, int64 [M], of any requests: each once, or not at all where the stream fails. From
        any thread, and from several at once; it is quick and never raises. A sample of a request that had not begun at the
        stream's end is ABORTED, without tokens and without experts."""

    def end(self) -> None:
        """End the stream: `take` returns None from now on."""


class GeneratorGroup(BackendGroup, Protocol):
    """All generators of a run, as the loop sees them."""

    @property
    def lacks_weights(self) -> bool:
        """Return whether one of several engines holds no weights, so that the next export has to be whole."""

    def take_restarts(self) -> int:
        """Return the number of engines that have come back, started anew, since the last time."""

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        """Generate what a feed brings until it ends; the generators hold `weight_version` when it begins. Requests join while
        others run where the generator is `continuous`, and are otherwise generated one after another. Where samples may be
        stale the loop calls it in a thread of its own, and trains and syncs weights meanwhile.

        WorkerError where a worker dies or hangs, or the last engine fails: the feed then has not got all that was taken."""


class WeightRoute(Protocol):
    """The way from trainer to generator."""

    def sync_weights(self, order: "RefitCommand") -> "Refitted":
        """Try a refit once. Raises RefitError or WorkerError where a generator does not hold what the trainer exported."""


@frozen(kw_only=True)
class RefitCommand:
    """The weights to hand over, and how."""

    export: ExportWeightsRequest
    channel: str
    may_alias: bool = True
    """True where the generator may keep the trainer's own tensors: only where it does not generate while the trainer steps."""
    delta: Delta = "off"
    """The device of the copies to which changes are relative; "off" where whole weights travel."""
    adapter: str = ""
    """RefitRequest.adapter."""
    drops: tuple[str, ...] = ()
    """RefitRequest.drops."""
    not_awaited: frozenset[int] = frozenset()
    """Ranks whose generators need not take part while they start anew."""

    def request(self, weights: WeightExport, *, waits: bool = True) -> RefitRequest:
        """Return the request that brings a generator the export of this command."""
        return RefitRequest(
            weight_version=self.export.weight_version,
            channel=self.channel,
            weights=weights,
            may_alias=self.may_alias,
            delta=self.delta,
            waits=waits,
            adapter=self.adapter,
            drops=self.drops,
        )


@frozen(kw_only=True)
class Refitted:
    """The result of a refit that has succeeded."""

    drafts: DraftCounts | None = None
    """Counts of all generators' draft tokens since the refit before; None where they draft none."""
    sent_bytes: int | None = None
    """The bytes that all ranks have sent; None where it is not counted."""
    digests: Mapping[str, int] = field(factory=dict)
    """The digest of each tensor, by its Hugging Face name; empty for a sharded export."""


@frozen(kw_only=True, eq=False)
class Backends:
    """The part that runs a recipe's trainer and generator."""

    trainer: TrainerGroup
    generator: GeneratorGroup | None
    route: WeightRoute | None
    """None where no generator runs."""
    critic: TrainerGroup | None = None
    """The critic, on the trainer's ranks; None where none is trained."""
    reference: TrainerGroup | None = None
    """The frozen model that the algorithm compares with, on devices of its own; None where there is none, or the trainer holds
    it."""


class ExecutionProgress(Protocol):
    """The run's display and log, as an execution tells them what it does. Called from any thread."""

    def note(self, text: str) -> None:
        """Show a warning of one line."""

    def phase(self, name: str) -> None:
        """Show what happens from now on, such as "workers" while these start."""

    def pool(self, name: str, doing: str) -> None:
        """Show what a pool of workers does from now on: "trainer", "generator" or "reference", and "train_step on 8 ranks" or
        "idle"."""

    def span(self, role: str, name: str, start: float, seconds: Sequence[float]) -> None:
        """Write a finished call of a pool into the timeline. `role` is the pool's name, `start` a time of time.perf_counter(),
        and `seconds` one number for each rank."""


OpenBackends: TypeAlias = Callable[[], AbstractContextManager[Backends]]
"""Builds trainer and generator, and closes them at the end of the block. The core calls it again where a WorkerError ended the
block before, at most `cluster.max_restarts` times."""


class EngineLimitError(WorkerError):
    """One engine has failed more often than the section `[cluster]` allows: new workers would only see it fail again, and the
    core starts none."""

"""Protocols and records between the parts of a run, with trainer and generator as the training loop sees them.

Each is one object, whatever number of processes stands behind it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
from attrs import define, field, frozen

from rlcore import spi
from rlcore.registry.algorithm_handle import AlgorithmState
from rlcore.run.data.tokenizer import Tokenizer, texts_of
from rlcore.spi.arrays import BoolArray, Float32Array, Int64Array


@frozen(kw_only=True, eq=False)
class Minibatch:
    """Sequences by number: their tokens are copied once, where they are cut for the workers."""

    batch: spi.TokenBatch
    """The whole batch of the step."""
    sequences: Int64Array
    """int64 [M], ascending."""
    counts: spi.GlobalCounts
    """The global counts of these sequences."""
    schedule_step: int
    """The number of this update among those that the run plans, from 0."""
    held: object | None = None
    """What the trainer knows it by, where `TrainerGroup.with_logprobs` has sent its data to the ranks."""

    @classmethod
    def of(cls, batch: spi.TokenBatch, sequences: Int64Array, num_loss_tokens: Int64Array, schedule_step: int) -> "Minibatch":
        """Some sequences, given the loss tokens of each of the batch's, int64 [N]."""
        lengths = num_loss_tokens[sequences]
        counts = spi.GlobalCounts(num_loss_tokens=int(lengths.sum()), num_loss_sequences=int(np.count_nonzero(lengths)))
        return cls(batch=batch, sequences=sequences, counts=counts, schedule_step=schedule_step)


@frozen(kw_only=True)
class LogprobsColumn:
    """Log-probabilities that the loss of some of a step's updates reads."""

    name: str
    """The token column."""
    model: Literal["policy", "reference"]
    first: int = 0
    """The number of the update from which on they are read."""


@frozen(kw_only=True, eq=False)
class CollectedRollouts(spi.RolloutBatch):
    """A step's samples, with what the run directory and the metrics tell of them besides."""

    success: BoolArray
    """bool [N]: whether the environment called the task solved; False where it failed."""
    responses: Sequence[str]
    """[N]: the text of all turns of the policy."""
    num_generated: Int64Array
    """int64 [N]: tokens that the policy generated."""
    failed: BoolArray
    """bool [N]: whether the environment failed, or the episode took too long."""
    timed_out: BoolArray
    """bool [N]: whether the episode took too long."""
    truncated: BoolArray
    """bool [N]: whether a limit of tokens or turns cut it off."""
    environment_metrics: Mapping[str, float] = field(factory=dict)
    """Means over the turns that report them, of valid episodes."""
    schedule_metrics: Mapping[str, float] = field(factory=dict)
    """How old the samples are, and what became of others, where steps overlap."""
    data_sets: Sequence[str] = ()
    """[G]: the data set of each group; none where there is only one."""
    oldest_version: int = 0
    """Tokens of older weights are to get the trainer's log-probabilities in place of the generator's."""

    def older_than(self, version: int) -> BoolArray:
        """bool [T]: the loss tokens of weights older than a version."""
        return self.batch.loss_mask & (self.batch.token_columns[spi.WEIGHT_VERSIONS] < version)


@frozen(kw_only=True, eq=False)
class Responses:
    """S samples. Their text is made where they are generated: for the driver alone it would be the longest part of a step."""

    result: spi.GenerateResult
    texts: Sequence[str]
    """[S]: decoded, without special tokens."""

    @classmethod
    def of(cls, result: spi.GenerateResult, tokenizer: Tokenizer) -> "Responses":
        """Return the samples of a result with the text of each."""
        return cls(result=result, texts=texts_of(result, tokenizer))


class Group(Protocol):
    """What trainers and generators have in common."""

    @property
    def is_usable(self) -> bool:
        """Whether all of it is open and in a known state."""

    def has(self, capability: str) -> bool:
        """Whether the provider declares a capability."""

    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Move what it holds; the bytes are those of the rank that keeps most."""

    def save_state(self, request: spi.SaveStateRequest) -> spi.SaveStateResult:
        """Write its state, each rank its part."""

    def load_state(self, request: spi.LoadStateRequest) -> spi.LoadStateResult:
        """Restore a state on every rank."""


class TrainerGroup(Group, Protocol):
    """All ranks of the trainer: whole batches in, whole results out."""

    def train_step(
        self, minibatch: Minibatch, loss: spi.LossSpec, weight_version: int, *, bounds: Mapping[str, float], logprobs: bool
    ) -> tuple[spi.TrainStepResult, Float32Array | None]:
        """One optimizer step on the minibatch, which holds at least one loss token; and, where `logprobs` asks for it, what
        `self.logprobs` would have returned for the policy and the minibatch's sequences before it. BoundError, and nothing
        changed, where a metric exceeds its bound."""

    def logprobs(
        self, batch: spi.TokenBatch, sequences: Int64Array, model: Literal["policy", "reference"], weight_version: int
    ) -> Float32Array:
        """float32 [T]: of every token of some of the batch's sequences, and 0.0 in the others."""

    def with_logprobs(
        self, minibatches: Sequence[Minibatch], columns: Sequence[LogprobsColumn], read: Collection[str], weight_version: int
    ) -> list[Minibatch]:
        """The minibatches of a step, which share a batch, with these columns for their updates: each is to be trained on at
        most once, in this order. `read` are the token columns that the updates read. The new ones may stay with the ranks that
        computed them, where the driver does not see them."""

    def values(self, batch: spi.TokenBatch, sequences: Int64Array, weight_version: int) -> Float32Array:
        """float32 [T]: the values after every token of some of the batch's sequences, and 0.0 in the others. Of a trainer with
        the head "value" alone."""


class ResponseFeed(Protocol):
    """Where the requests of a group's stream come from and its samples go: rlcore.spi.SampleFeed, but for their texts."""

    def take(self, *, wait: bool) -> Sequence[spi.GenerateRequest] | None:
        """Requests that came since the last call; None once the stream is to end. Samples are numbered in the order of being
        taken, and one thread calls it at a time."""

    def deliver(self, samples: Int64Array, responses: Responses) -> None:
        """Hand out samples that have ended, int64 [M], of any requests: each once, or not at all where the stream fails. From
        any thread, and from several at once; it is quick and never raises. A sample of a request that had not begun at the
        stream's end is ABORTED, without tokens and without experts."""

    def end(self) -> None:
        """End the stream: `take` returns None from now on."""


class GeneratorGroup(Group, Protocol):
    """All generators of a run, as the loop sees them."""

    @property
    def lacks_weights(self) -> bool:
        """Whether one of several engines holds no weights, so that the next export has to be whole."""

    def take_restarts(self) -> int:
        """How many engines have come back, started anew, since the last time."""

    def stream(self, feed: ResponseFeed, weight_version: int) -> None:
        """Generate what a feed brings until it ends; the generators hold `weight_version` when it begins. Requests join while
        others run where the generator is `continuous`, and are otherwise generated one after another.

        WorkerError where a worker dies or hangs, or the last engine fails: the feed then has not got all that was taken."""


class WeightRoute(Protocol):
    """The way from trainer to generator."""

    def sync_weights(self, order: "RefitCommand") -> "Refitted":
        """One attempt. Raises RefitError or WorkerError where a generator does not hold what the trainer exported."""


@frozen(kw_only=True)
class RefitCommand:
    """What is to be handed over, and how."""

    export: spi.ExportWeightsRequest
    channel: str
    may_alias: bool = True
    """Whether the generator may keep the trainer's own tensors: only where it does not generate while the trainer steps."""
    delta: spi.Delta = "off"
    """Whether changes alone may travel, and where they are relative to copies."""
    not_awaited: frozenset[int] = frozenset()
    """Ranks whose generators need not take part while they start anew."""


@frozen(kw_only=True)
class Refitted:
    """What a refit that has succeeded came to."""

    drafts: spi.DraftCounts | None = None
    """What all generators have guessed since the one before; None where they guess no tokens."""
    sent_bytes: int | None = None
    """What all ranks have sent; None where it is not counted."""


@frozen(kw_only=True, eq=False)
class Backends:
    """What runs a recipe's trainer and generator."""

    trainer: TrainerGroup
    generator: GeneratorGroup | None
    route: WeightRoute | None
    """None where no generator runs."""
    critic: TrainerGroup | None = None
    """The critic, on the trainer's ranks; None where none is trained."""
    reference: TrainerGroup | None = None
    """The frozen model that the algorithm compares with, on devices of its own; None where there is none, or the trainer holds
    it."""


@define(kw_only=True, eq=False)
class LoopPosition:
    """The position of the loop."""

    step: int = 0
    """The number of steps that are done."""
    weight_version: int = 0
    """Optimizer steps done: the version the trainer holds."""
    critic_version: int = 0
    """Optimizer steps of the critic that are done: the version that it holds."""
    step_critic_version: int = 0
    """The critic's version that `step` ended with."""
    step_version: int = 0
    """The version that `step` ended with: behind weight_version while updates of the next step are done."""
    unlogged: dict[str, float] | None = None
    """Metrics of `step` while its evaluation and its line in metrics.jsonl are still to come."""
    algorithm_state: AlgorithmState | None = None
    """What the algorithm kept when `step` was done; None where it keeps nothing. Its own is ahead of that within a step."""
    saved_step: int = -1
    """Step of the newest checkpoint that this process wrote or read; -1 where there is none."""

    @property
    def is_whole(self) -> bool:
        """Whether no step is half done."""
        return (self.weight_version, self.critic_version) == (self.step_version, self.step_critic_version)

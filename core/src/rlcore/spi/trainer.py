"""The trainer's hooks and their records. Every rank receives each call, with its own part of the data."""

from collections.abc import Mapping
from typing import Literal, Protocol

from attrs import field, frozen

from rlcore.spi.arrays import Float32Array
from rlcore.spi.batch import GlobalCounts, TokenBatch
from rlcore.spi.errors import ContractError
from rlcore.spi.lifecycle import (
    CloseRequest,
    LoadStateRequest,
    LoadStateResult,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
    hookspec,
)
from rlcore.spi.loss import LossSpec
from rlcore.spi.weights import Delta, DtypeName, WeightExport


@frozen(kw_only=True)
class TrainerLayout:
    """The division of data among the trainer's ranks; the attribute `layout` of every trainer backend."""

    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    """Ranks of one data-parallel rank (tensor, pipeline, context parallel) receive the same microbatches."""


@frozen(kw_only=True, eq=False)
class TrainStepRequest:
    """The request for one optimizer step."""

    microbatches: tuple[TokenBatch, ...]
    """This data-parallel rank's share, at least one; every rank has equally many. They may hold no loss token at all. A token
    column ROUTED_EXPERTS, in all of them or in none, decides where tokens go; it needs the capability `routing_replay`.
    TokenBatch.sampling_mask makes all log-probabilities and entropies those of the tokens that were kept, renormalised: it
    needs the capability `sampling_mask_replay`. Values know of none."""
    counts: GlobalCounts
    """Global counts over all microbatches of all ranks."""
    loss: LossSpec
    temperature: float
    """Logits are divided by it before the log-softmax, as the sampler did; positive. Values know of none."""
    weight_version: int
    """The version that the trainer must hold before the step."""
    bounds: Mapping[str, float] = field(factory=dict)
    """Greatest value of each of these metrics, where it is reported. A step that exceeds one raises BoundError and leaves
    everything as it was. Needs the capability `metric_bounds`."""
    schedule_step: int = field()
    """The step's place in the plan of the run, counted from 0 in optimizer steps: what TrainerContext.learning_rate is asked
    for. It runs ahead of `weight_version` where planned updates were not made, since there was nothing to learn. Needs the
    capability `schedule_step`."""
    logprobs: bool = False
    """True where the trainer returns the log-probabilities that the loss gets. Needs the capability `step_logprobs`."""
    gradient_norms: bool = False
    """True where the trainer returns the norm of each tensor's gradient. Needs the capability `gradient_norms`."""

    @schedule_step.default
    def _schedule_step(self) -> int:
        return self.weight_version


@frozen(kw_only=True)
class TrainStepResult:
    """The step's figures, reduced over all ranks and equal on each."""

    weight_version: int
    """request.weight_version + 1."""
    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    """The one this step used."""
    metrics: Mapping[str, float] = field(factory=dict)
    """The loss function's sums and maxima, and MISMATCH_METRICS where LossSpec.generation_mismatch asks for them."""
    logprobs: tuple[Float32Array, ...] | None = field(default=None, eq=False)
    """float32 [T] each, as in LogprobsResult, at the weights before the step; None unless asked for."""
    gradient_norms: Mapping[str, float] | None = None
    """L2 norm before clipping of the gradient of each tensor that trains, over all ranks, by its name in exports; adapters by
    the names of their A and B. A tied tensor has one name. Squares of gradients are added up in float64: the root of
    the sum over all tensors is `grad_norm`, up to rounding. None unless asked for."""


@frozen(kw_only=True, eq=False)
class ForwardBackwardRequest:
    """The request for the gradients of one piece of an optimizer step. `optim_step` applies those of all its pieces."""

    microbatches: tuple[TokenBatch, ...]
    """This data-parallel rank's share of the piece, as in TrainStepRequest."""
    counts: GlobalCounts
    """The global counts that the loss divides by: those of the whole step, so that pieces add up to it."""
    loss: LossSpec
    temperature: float
    """Logits are divided by it before the log-softmax; positive."""
    weight_version: int
    """The version that the trainer must hold."""
    piece: int = 0
    """The number of pieces whose gradients the trainer must hold. 0 begins a step: it drops whatever gradients are left."""
    logprobs: bool = True
    """True where the trainer returns the log-probabilities that the loss gets. Needs the capability `step_logprobs`."""


@frozen(kw_only=True)
class ForwardBackwardResult:
    """The figures of one piece, reduced over all ranks and equal on each."""

    loss: float
    metrics: Mapping[str, float] = field(factory=dict)
    """The metrics of this piece alone, with the meaning of TrainStepResult.metrics."""
    logprobs: tuple[Float32Array, ...] | None = field(default=None, eq=False)
    """float32 [T] each, as in LogprobsResult; None unless asked for."""
    weight_version: int
    """The version that the trainer holds."""


@frozen(kw_only=True)
class OptimStepRequest:
    """The request to apply the gradients of all pieces. A setting that is None is the recipe's."""

    pieces: int
    """The number of pieces whose gradients the trainer must hold, at least 1."""
    weight_version: int
    """The version that the trainer must hold before the step."""
    schedule_step: int = field()
    """The step's place in the plan of the run, with the meaning of TrainStepRequest.schedule_step."""
    learning_rate: float | None = None
    """The rate in place of the schedule's. Tensors of a group keep the ratio of their rate to that of OptimizerSpec."""
    betas: tuple[float, float] | None = None
    """AdamW's betas, for all tensors whose betas are those of OptimizerSpec."""
    eps: float | None = None
    weight_decay: float | None = None
    """The weight decay of all tensors whose weight decay is that of OptimizerSpec."""
    max_grad_norm: float | None = None
    """0.0 clips nothing."""
    gradient_norms: bool = False
    """True as in TrainStepRequest."""

    @schedule_step.default
    def _schedule_step(self) -> int:
        return self.weight_version


@frozen(kw_only=True)
class OptimStepResult:
    """The figures of the step, equal on each rank."""

    weight_version: int
    """request.weight_version + 1."""
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    """The one this step used."""
    metrics: Mapping[str, float] = field(factory=dict)
    """The trainer's own figures of the step, such as norms of parts."""
    gradient_norms: Mapping[str, float] | None = None
    """Norms of the sums of all pieces' gradients, as in TrainStepResult."""


@frozen(kw_only=True)
class UseAdapterRequest:
    """The request to make one of several adapters on the same model the one that all later calls are of.

    Each has weights, gradients, moments, a weight version and dropout of its own. A trainer is built with the one named "".
    """

    name: str
    seed: int | None = None
    """Begins the adapter anew, at version 0: its first values and its dropout depend on it, as on TrainerContext.seed. None
    continues one that was begun."""
    rank: int | None = None
    """Rank of an adapter that begins, 1 to LoraSpec.rank, which None means. Rows of A and columns of B behind it are zero and
    stay zero. The product is scaled by alpha / rank; B of an export that is not merged has what differs from LoraSpec.scale."""
    drops: tuple[str, ...] = ()
    """Names of others to forget."""


@frozen(kw_only=True)
class UseAdapterResult:
    """The adapter in use."""

    weight_version: int


@frozen(kw_only=True, eq=False)
class ForwardBackwardTogetherRequest:
    """The request for a piece of a step of each of several adapters. It means what `use_adapter` and `forward_backward` compute
    by turns; the adapter in use stays in use."""

    pieces: Mapping[str, ForwardBackwardRequest]
    """Each adapter's own piece, by the adapter's name; at least one. Versions and piece numbers are those of the adapter. A
    trainer computes at most TrainerContext.max_microbatch_tokens at once, where no microbatch is larger."""


@frozen(kw_only=True)
class ForwardBackwardTogetherResult:
    """The figures of each adapter's piece."""

    pieces: Mapping[str, ForwardBackwardResult]
    """The results by the adapters' names, in the order of the request."""


@frozen(kw_only=True, eq=False)
class LogprobsRequest:
    """Log-probabilities of given tokens, without a gradient."""

    microbatches: tuple[TokenBatch, ...]
    """With model="policy" the token column ROUTED_EXPERTS works as in train_step; the reference always routes itself.
    TokenBatch.sampling_mask works as in train_step with both: they are compared over the tokens that could be sampled."""
    model: Literal["policy", "reference"]
    temperature: float
    entropy: bool
    """True where the trainer returns the entropy too."""
    weight_version: int
    """The version that the trainer must hold."""


@frozen(kw_only=True, eq=False)
class LogprobsResult:
    """One array a microbatch, in the request's order; where ModelSpec.dtype is float64, of float64."""

    logprobs: tuple[Float32Array, ...]
    """float32 [T] each; 0.0 at the first token of each sequence, computed at every other whatever loss_mask says."""
    entropy: tuple[Float32Array, ...] | None
    """float32 [T] each in nats, 0.0 at first tokens; None unless asked for. Of the same distribution as `logprobs`."""
    weight_version: int


@frozen(kw_only=True, eq=False)
class ValuesRequest:
    """Values of given tokens, without a gradient."""

    microbatches: tuple[TokenBatch, ...]
    weight_version: int
    """The version that the trainer must hold."""


@frozen(kw_only=True, eq=False)
class ValuesResult:
    """One array a microbatch, in the request's order; where ModelSpec.dtype is float64, of float64."""

    values: tuple[Float32Array, ...]
    """float32 [T] each: the head's output after reading token t, at every token, the first of a sequence too, whatever
    loss_mask says."""
    weight_version: int


@frozen(kw_only=True)
class ExportWeightsRequest:
    """Stream the policy's weights."""

    weight_version: int
    """The version that the trainer must hold."""
    dtype: DtypeName
    """Floating-point tensors are cast to it, but those that a model keeps in a dtype of their own (TensorSpec.keeps_dtype)."""
    max_bucket_bytes: int
    """A bucket holds at most this much, or one tensor that is larger."""
    adapters: Literal["merged", "apart", "alone"] = "merged"
    """How a trainer of adapters exports them. "merged": in the weights. "apart": the base weights, then A and B of every
    adapter, as a layer's name with `lora_A.weight` and `lora_B.weight`. "alone": only A and B, since the base weights have not
    changed since "apart". The last two need the capability `adapter_refit`."""
    sharded: bool = False
    """True where ranks send the parts that they hold, as WeightExport.shards says, and yield no buckets. Needs the capability
    of a channel that is `sharded`."""
    delta: Delta = "off"
    """The `delta` of WeightExport.shards; "off" where the export is not sharded. All else needs the capability
    `delta_refit`."""


SPLIT_HOOKS = ("forward_backward", "optim_step")
"""The hooks of the capability `split_step`. A backend that has them may leave out train_step."""
OPTIONAL_TRAINER_HOOKS = ("get_values", *SPLIT_HOOKS, "use_adapter", "forward_backward_together")
"""Hooks of a trainer that a backend may leave out, where it does not declare their capability."""


class TrainerSpec(Protocol):
    """The hooks of a trainer. A backend implements them with `rlcore.spi.hookimpl`, in exactly these signatures. It may leave
    out get_values if it lacks the capability `value_head`. The body here is what then happens. With the capability `split_step`
    it has forward_backward and optim_step, and may leave out train_step: the core makes a step of the two.

    A trainer built with `context.head = "value"` has no distribution over tokens. The core asks it for no get_logprobs,
    entropy, reference or routing. It asks a trainer built with "tokens" for no get_values.

    A NaN or infinite loss or gradient raises NonFiniteError and leaves weights, optimizer and version as they were.
    """

    layout: TrainerLayout

    @hookspec(firstresult=True)
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        """Accumulate the gradients of all microbatches, clip, and apply one optimizer step."""

    @hookspec(firstresult=True)
    def forward_backward(self, request: ForwardBackwardRequest) -> ForwardBackwardResult:  # noqa: ARG002
        """Add the gradients of a piece to those held. One that raises drops all of them. Needs the capability `split_step`."""
        raise ContractError("forward_backward: found a trainer without it; expected the capability `split_step`")

    @hookspec(firstresult=True)
    def optim_step(self, request: OptimStepRequest) -> OptimStepResult:  # noqa: ARG002
        """Clip the gradients held, apply one optimizer step, and drop them, also where it raises. Needs `split_step`."""
        raise ContractError("optim_step: found a trainer without it; expected the capability `split_step`")

    @hookspec(firstresult=True)
    def use_adapter(self, request: UseAdapterRequest) -> UseAdapterResult:  # noqa: ARG002
        """Change to another adapter, with nothing of any changed. Needs the capability `many_adapters`."""
        raise ContractError("use_adapter: found a trainer without it; expected the capability `many_adapters`")

    @hookspec(firstresult=True)
    def forward_backward_together(self, request: ForwardBackwardTogetherRequest) -> ForwardBackwardTogetherResult:  # noqa: ARG002
        """Add a piece to the gradients of each of several adapters. One that raises leaves those of all as they were. Needs the
        capability `adapters_together`; the core goes through other trainers' adapters by turns."""
        raise ContractError("forward_backward_together: found a trainer without the capability `adapters_together`")

    @hookspec(firstresult=True)
    def get_logprobs(self, request: LogprobsRequest) -> LogprobsResult:
        """Log-probabilities (and entropy) of the given tokens under the policy or the reference."""

    @hookspec(firstresult=True)
    def get_values(self, request: ValuesRequest) -> ValuesResult:  # noqa: ARG002
        """Values of the given tokens. Needs the capability `value_head` and `context.head = "value"`."""
        raise ContractError("get_values: found a trainer that does not implement it; expected the capability `value_head`")

    @hookspec(firstresult=True)
    def export_weights(self, request: ExportWeightsRequest) -> WeightExport:
        """The policy's full weights; every rank iterates its buckets to the end."""

    @hookspec(firstresult=True)
    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move weights and optimizer state between device and host, and give back device memory that is held unused."""

    @hookspec(firstresult=True)
    def save_state(self, request: SaveStateRequest) -> SaveStateResult:
        """Write the state, each rank its part."""

    @hookspec(firstresult=True)
    def load_state(self, request: LoadStateRequest) -> LoadStateResult:
        """Restore a state so that the next step equals the one that would have followed the save."""

    @hookspec(firstresult=True)
    def close(self, request: CloseRequest) -> None:
        """Free everything."""

"""The interface of loss functions, which an algorithm names and every trainer runs.

A loss is `def my_loss(inputs: LossInputs, config: MyLossConfig) -> LossOutput`, importable in the workers by its path. It
divides by the global counts only, so that its value depends on no microbatch, packing or parallel layout. A trainer that
splits sequences over ranks gathers the per-token tensors before the call: a loss always sees whole sequences.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

from attrs import field, frozen

from rlcore.spi.batch import PREVIOUS_LOGPROBS, GlobalCounts

if TYPE_CHECKING:
    from torch import Tensor

ColumnT = TypeVar("ColumnT")

MISMATCH_METRICS = ("token_mult_prob_error", "generation_kl_error", "importance_ratio")
"""Compare the trainer's log-probabilities with the generator's at the same weights, by δ = trainer - generation in nats. The
metrics are means over the loss tokens of the optimizer step. The first is of exp(|δ|), which is 1 where the two are equal. The
second is of e^δ - 1 - δ, an estimate of KL(generation ‖ trainer). The third is of e^δ, as 0 where it is not finite. The first
two clamp δ to ±50. No loss reports a metric of these names."""


@frozen(kw_only=True)
class LossSpec:
    """Names a loss function and its constants; travels from the driver to every worker."""

    path: str
    """`package.module:function`, imported in the worker."""
    config: object
    """A frozen, picklable attrs object, passed to the function as it is."""
    token_columns: tuple[str, ...] = ()
    """Per-token columns that the loss reads and every microbatch therefore carries."""
    entropy: Literal["none", "metric", "loss"] = "none"
    """The entropy that the trainer computes: not at all, without a gradient, or with one."""
    previous_logprobs: Literal["unchanged", "given", "absent"] = "absent"
    """The content of LossInputs.previous_logprobs, as the loop declares it for each update. "unchanged": the weights are those
    at the start of the step, so the update's own log-probabilities are the previous ones. "given": the weights have changed
    since, or the update drops inputs of adapters (LoraSpec.dropout), and every microbatch carries the token column
    PREVIOUS_LOGPROBS, which token_columns names. "absent": one or the other, and nobody computed them. Needs the capability
    `previous_logprobs`."""
    generation_mismatch: bool = False
    """True where the trainer reports MISMATCH_METRICS beside the loss's own, as the loop declares it: for the first update of a
    step, where every loss token of the step was generated at the weights that this update starts from (by the token column
    WEIGHT_VERSIONS), samples come from the whole distribution, and the update drops no inputs of adapters. Every microbatch
    then carries the token column GENERATION_LOGPROBS, which token_columns names. The loss need not know of it."""

    def previous_of(self, token_columns: Mapping[str, ColumnT], current: ColumnT) -> ColumnT | None:
        """Return LossInputs.previous_logprobs, as declared: `current` (to be detached) or the column, [T] each; or None."""
        match self.previous_logprobs:
            case "unchanged":
                return current
            case "given":
                return token_columns[PREVIOUS_LOGPROBS]
            case "absent":
                return None


@frozen(kw_only=True, eq=False)
class LossInputs:
    """One microbatch, as torch tensors on the trainer's device; figures are float64 where ModelSpec.dtype is."""

    logprobs: "Tensor"
    """float32 [T], differentiable: current log-probabilities at the step's temperature; 0.0 at first tokens. Of a trainer with
    the head "value", which has none, zeros without a gradient."""
    entropy: "Tensor | None"
    """float32 [T] in nats, 0.0 at first tokens; None unless LossSpec.entropy asks for it; with a gradient for "loss". Of the
    distribution that `logprobs` are of: with TokenBatch.sampling_mask, of the tokens that were kept."""
    loss_mask: "Tensor"
    """bool [T]"""
    offsets: "Tensor"
    """int64 [N+1]"""
    token_columns: "Mapping[str, Tensor]"
    """One array [T] for each name that the loss asked for."""
    sequence_columns: "Mapping[str, Tensor]"
    """One array [N] for each name that the loss asked for."""
    counts: GlobalCounts
    """Global counts of the optimizer step."""
    previous_logprobs: "Tensor | None" = None
    """float32 [T], without a gradient: the trainer's log-probabilities at the start of the step, as LossSpec.previous_logprobs
    declares them; None where they are not known."""
    values: "Tensor | None" = None
    """float32 [T], differentiable: the value after reading token t, at first tokens too. None unless TrainerContext.head is
    "value"."""


@frozen(kw_only=True, eq=False)
class LossOutput:
    """A microbatch's part of the loss and metrics; parts are added over microbatches and data-parallel ranks."""

    loss: "Tensor"
    """float32 scalar, differentiable, already divided by global counts."""
    sums: "Mapping[str, Tensor]" = field(factory=dict)
    """Metrics that add up: each a detached scalar already divided by a global count."""
    maxima: "Mapping[str, Tensor]" = field(factory=dict)
    """Metrics of which the greatest counts: each a detached scalar."""

"""The loss function that an algorithm names, evaluated on microbatches, and their sum."""

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NoReturn, Protocol

import torch
from attrs import define, evolve, frozen
from torch import Tensor

from rlcore.spi.batch import GENERATION_LOGPROBS, GlobalCounts
from rlcore.spi.errors import ContractError, PluginError
from rlcore.spi.loss import MISMATCH_METRICS, LossInputs, LossOutput, LossSpec
from rlcore_torchkit.rl.policy_gradient import importance_ratio
from rlcore_torchkit.rl.sequences import MaskedMean
from rlcore_torchkit.trainer.microbatch import Microbatch


class LossFunction(Protocol):
    """The function that LossSpec.path names."""

    def __call__(self, inputs: LossInputs, config: object) -> LossOutput: ...


@frozen(kw_only=True, eq=False)
class Totals:
    """Sums over this rank's microbatches, still on the device."""

    loss: Tensor
    """float64 scalar."""
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


def no_losses(device: torch.device) -> Totals:
    """The sums over no microbatch."""
    return Totals(loss=torch.zeros((), dtype=torch.float64, device=device), sums={}, maxima={})


@cache
def load_loss(path: str) -> LossFunction:
    """The function that `package.module:function` names."""
    module, _, name = path.partition(":")
    try:
        function: LossFunction = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise PluginError(f"loss {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    return function


def evaluate(
    loss: LossSpec,
    batch: Microbatch,
    logprobs: Tensor,
    entropy: Tensor | None,
    counts: GlobalCounts,
    values: Tensor | None = None,
) -> LossOutput:
    """The loss of one microbatch, given the log-probabilities and entropies [T] of its tokens, or zeros and the values [T]
    after them.

    Where LossSpec.generation_mismatch asks for them, MISMATCH_METRICS stand beside the loss's own metrics.
    """
    previous = loss.previous_of(batch.token_columns, logprobs)
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        loss_mask=batch.loss_mask,
        offsets=batch.offsets,
        token_columns=batch.token_columns,
        sequence_columns=batch.sequence_columns,
        counts=counts,
        previous_logprobs=None if previous is None else previous.detach(),
        values=values,
    )
    function = load_loss(loss.path)
    try:
        output = function(inputs, loss.config)
    except Exception as error:
        error.add_note(f"raised in the loss {loss.path}, which was given {_given(inputs)}")
        raise
    _check(loss.path, output, logprobs if values is None else values)
    if not loss.generation_mismatch:
        return output
    found = mismatch(logprobs, batch.token_columns[GENERATION_LOGPROBS], MaskedMean(batch.loss_mask, counts))
    return evolve(output, sums={**output.sums, **found})


@define(eq=False)
class DeferredErrors:
    """Evaluates the losses of a step, whose errors wait for its end.

    A loss that raises counts as 0, and the passes go on: each rank takes part in every collective, and no gradient is left
    half reduced.
    """

    first: Exception | None = None
    """The error of the first loss that raised."""

    def evaluate(
        self,
        loss: LossSpec,
        batch: Microbatch,
        logprobs: Tensor,
        entropy: Tensor | None,
        counts: GlobalCounts,
        values: Tensor | None = None,
    ) -> LossOutput:
        """Return `evaluate`'s result."""
        try:
            return evaluate(loss, batch, logprobs, entropy, counts, values)
        except Exception as error:
            self.first = self.first or error
            return LossOutput(loss=((logprobs if values is None else values) * 0.0).sum())

    def raise_first(self) -> None:
        """Raise the first error, if there is one."""
        if self.first is not None:
            raise self.first


def _given(inputs: LossInputs) -> str:
    """Describe a loss's inputs, and who asks for those that are missing."""
    parts = [f"the token columns {', '.join(inputs.token_columns) or '(none)'}"]
    if inputs.previous_logprobs is None:
        parts.append("no previous_logprobs (AlgorithmNeeds.previous_logprobs asks for them)")
    if inputs.entropy is None:
        parts.append("no entropy (LossSpec.entropy asks for it)")
    return "; ".join(parts)


def _check(path: str, output: object, figures: Tensor) -> None:
    """ContractError where the loss function returned what it must not. Looks at no value, so it waits for no device."""

    def refuse(found: str, expected: str) -> NoReturn:
        raise ContractError(f"loss {path}: found {found}; expected {expected}")

    if not isinstance(output, LossOutput):
        refuse(f"a {type(output).__name__}", "a LossOutput")
    scalars = {"loss": output.loss}
    for field in ("sums", "maxima"):
        values = getattr(output, field)
        if not isinstance(values, Mapping):
            refuse(f"{field} that is a {type(values).__name__}", "a mapping from names to scalar tensors")
        if taken := sorted(values.keys() & {*MISMATCH_METRICS}):
            refuse(f"{field}[{taken[0]!r}]", "another name: the trainer itself reports a metric of that one")
        scalars |= {f"{field}[{name!r}]": value for name, value in values.items()}
    for name, value in scalars.items():
        if not isinstance(value, Tensor):
            refuse(f"{name} that is a {type(value).__name__}", "a scalar tensor")
        if value.ndim or not (value.is_floating_point() or name != "loss"):
            refuse(f"{name} of shape {list(value.shape)} and {value.dtype}", "a scalar tensor, already reduced")
    if figures.requires_grad and output.loss.grad_fn is None:
        refuse(
            "a loss without a gradient", "one that is computed from inputs.logprobs, or values, with torch, and not detached"
        )


def total(outputs: Sequence[LossOutput]) -> Totals:
    """Over microbatches, of which there is at least one; ContractError where they do not report the same metrics."""
    first = outputs[0]
    for output in outputs:
        if output.sums.keys() != first.sums.keys() or output.maxima.keys() != first.maxima.keys():
            found = f"metrics {sorted({*output.sums, *output.maxima})} after {sorted({*first.sums, *first.maxima})}"
            raise ContractError(f"loss function: found {found}; expected the same from every microbatch")
    return Totals(
        loss=torch.stack([output.loss.detach().double() for output in outputs]).sum(),
        sums={name: torch.stack([output.sums[name].double() for output in outputs]).sum() for name in sorted(first.sums)},
        maxima={name: torch.stack([output.maxima[name] for output in outputs]).amax() for name in sorted(first.maxima)},
    )


MAX_DIFFERENCE = 50.0
"""The largest difference in nats that counts; e⁵⁰ times any number of tokens is finite in float32."""


def mismatch(trainer: Tensor, generation: Tensor, mean: MaskedMean) -> dict[str, Tensor]:
    """MISMATCH_METRICS of the trainer's and the generator's log-probabilities, float32 [T] each, at the same weights.

    Weights with nothing in common give a large number, not an infinite one.
    """
    trainer = trainer.detach()
    delta = (trainer - generation).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    return {
        "token_mult_prob_error": mean(torch.exp(delta.abs())),
        "generation_kl_error": mean(torch.expm1(delta) - delta),
        "importance_ratio": mean(importance_ratio(trainer, generation)),
    }

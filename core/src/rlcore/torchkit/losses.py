"""The loss function that an algorithm names, evaluated on microbatches, and their sum."""

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi.batch import GlobalCounts
from rlcore.spi.errors import ContractError
from rlcore.spi.loss import LossInputs, LossOutput, LossSpec
from rlcore.torchkit.microbatch import Microbatch


class LossFunction(Protocol):
    """What LossSpec.path names."""

    def __call__(self, inputs: LossInputs, config: object) -> LossOutput: ...


@frozen(kw_only=True, eq=False)
class Totals:
    """Sums over this rank's microbatches, still on the device."""

    loss: Tensor
    """float64 scalar."""
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


@cache
def load_loss(path: str) -> LossFunction:
    """The function that `package.module:function` names."""
    module, _, name = path.partition(":")
    function: LossFunction = getattr(importlib.import_module(module), name)
    return function


def evaluate(loss: LossSpec, batch: Microbatch, logprobs: Tensor, entropy: Tensor | None, counts: GlobalCounts) -> LossOutput:
    """The loss of one microbatch, given the log-probabilities and entropies [T] of its tokens."""
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        loss_mask=batch.loss_mask,
        offsets=batch.offsets,
        token_columns=batch.token_columns,
        sequence_columns=batch.sequence_columns,
        counts=counts,
    )
    return load_loss(loss.path)(inputs, loss.config)


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

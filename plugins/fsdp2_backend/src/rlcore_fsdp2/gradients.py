"""One optimizer step's gradients and figures, over microbatches and ranks, read back from the device once."""

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlcore.spi import ContractError, GlobalCounts, LossInputs, LossOutput, LossSpec
from rlcore.torchkit.logprobs import packed_logprobs
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.microbatch import Microbatch
from rlcore_fsdp2.optimizer import local_norms, squared_norm


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


@frozen(kw_only=True)
class Figures:
    """Totals over all ranks, equal on each."""

    loss: float
    grad_norm: float
    metrics: Mapping[str, float]


@cache
def load_loss(path: str) -> LossFunction:
    """The function that `package.module:function` names."""
    module, _, name = path.partition(":")
    function: LossFunction = getattr(importlib.import_module(module), name)
    return function


def accumulate(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    loss: LossSpec,
    counts: GlobalCounts,
    temperature: float,
    *,
    reduce_every_microbatch: bool,
) -> Totals:
    """Add the gradients of the microbatches' losses to the parameters' `.grad`, summed over ranks.

    `model` went through `patch_head` and, unless it is whole on its only rank, through `shard`.
    """
    function = load_loss(loss.path)
    outputs = []
    for index, microbatch in enumerate(microbatches):
        if isinstance(model, FSDPModule):
            _set_last(model, reduce_every_microbatch or index == len(microbatches) - 1)
        outputs.append(_backward(model, microbatch, function, loss, counts, temperature))
    return _total(outputs)


def reduce(totals: Totals, gradients: Sequence[Tensor], layout: ParallelLayout) -> Figures:
    """Add up the data-parallel ranks' totals and all ranks' gradient norms in one collective, and read them back."""
    world_size = layout.world_size
    figures = torch.stack([totals.loss, *_float64(totals.sums)])
    if not layout.is_first_of_data_rank:
        figures = torch.zeros_like(figures)
    norm = squared_norm(gradients).to(figures.device)
    sums = torch.cat([figures, norm[None]])
    maxima = torch.stack([*_float64(totals.maxima)]) if totals.maxima else sums.new_zeros(0)
    packed = torch.cat([sums, maxima])
    if world_size > 1:
        parts = [torch.empty_like(packed) for _ in range(world_size)]
        dist.all_gather(parts, packed)
        by_rank = torch.stack(parts)
        packed = torch.cat([by_rank[:, : len(sums)].sum(0), by_rank[:, len(sums) :].amax(0)])
    loss, *values = packed.tolist()
    names = [*totals.sums, "", *totals.maxima]
    metrics = dict(zip(names, values, strict=True))
    return Figures(loss=loss, grad_norm=metrics.pop("") ** 0.5, metrics=metrics)


def non_finite_names(named: Mapping[str, Tensor], world_size: int) -> list[str]:
    """Parameters whose gradient is NaN or infinite on any rank."""
    flags = (~local_norms(named.values()).isfinite()).float()
    if world_size > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [name for name, flag in zip(named, flags.tolist(), strict=True) if flag]


def _set_last(model: FSDPModule, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)


def _backward(
    model: nn.Module, batch: Microbatch, function: LossFunction, loss: LossSpec, counts: GlobalCounts, temperature: float
) -> LossOutput:
    logprobs, entropy = packed_logprobs(model, batch.tokens, batch.packed, temperature=temperature, entropy=loss.entropy)
    inputs = LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        loss_mask=batch.loss_mask,
        offsets=batch.offsets,
        token_columns=batch.token_columns,
        sequence_columns=batch.sequence_columns,
        counts=counts,
    )
    output = function(inputs, loss.config)
    output.loss.backward()
    return LossOutput(loss=output.loss.detach(), sums=output.sums, maxima=output.maxima)


def _total(outputs: Sequence[LossOutput]) -> Totals:
    first = outputs[0]
    for output in outputs:
        if output.sums.keys() != first.sums.keys() or output.maxima.keys() != first.maxima.keys():
            found = f"metrics {sorted({*output.sums, *output.maxima})} after {sorted({*first.sums, *first.maxima})}"
            raise ContractError(f"loss function: found {found}; expected the same from every microbatch")
    return Totals(
        loss=torch.stack([output.loss.double() for output in outputs]).sum(),
        sums={name: torch.stack([output.sums[name].double() for output in outputs]).sum() for name in sorted(first.sums)},
        maxima={name: torch.stack([output.maxima[name] for output in outputs]).amax() for name in sorted(first.maxima)},
    )


def _float64(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors.values()]

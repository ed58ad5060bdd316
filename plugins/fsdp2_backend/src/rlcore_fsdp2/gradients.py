"""One optimizer step's gradients and statistics, over microbatches and ranks, read back from the device once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from rlcore.spi import GlobalCounts, LossOutput, LossSpec
from rlcore_fsdp2.config import MOST_HELD
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.optimizer import local_norms, squared_norm
from rlcore_torchkit.head.logprobs import packed_logprobs
from rlcore_torchkit.head.values import has_value_head, packed_values
from rlcore_torchkit.trainer.losses import DeferredErrors, Totals
from rlcore_torchkit.trainer.microbatch import Microbatch
from rlcore_torchkit.trainer.step_stats import StepStats


def accumulate(
    model: nn.Module,
    microbatches: Sequence[Microbatch],
    loss: LossSpec,
    counts: GlobalCounts,
    temperature: float,
    errors: DeferredErrors,
    *,
    reduce_every_microbatch: bool,
    prepare: Callable[[int, Microbatch], None] | None = None,
    logprobs: list[Tensor] | None = None,
) -> list[LossOutput]:
    """Add the gradients of the microbatches' losses to the parameters' `.grad`, summed over ranks; and to `logprobs` the
    log-probabilities [T] of each microbatch. `prepare` is called with each and its number before it runs. `errors` gets the
    errors of the loss.

    `model` went through `patch_head` and, unless it is whole on its only rank, through `shard`.
    """
    outputs = []
    for index, microbatch in enumerate(microbatches):
        if prepare is not None:
            prepare(index, microbatch)
        if isinstance(model, FSDPModule):
            set_last(model, reduce_every_microbatch or index == len(microbatches) - 1)
        output, found = _backward(model, microbatch, loss, counts, temperature, errors)
        outputs.append(output)
        if logprobs is not None:
            logprobs.append(found)
    return outputs


def reduce(totals: Totals, gradients: Sequence[Tensor], layout: ParallelLayout) -> StepStats:
    """Add up the data-parallel ranks' totals and all ranks' gradient norms in one collective, and read them back. The norm of
    no gradients is 0."""
    world_size = layout.world_size
    losses = torch.stack([totals.loss, *_float64(totals.sums)])
    if not layout.is_first_of_data_rank:
        losses = torch.zeros_like(losses)
    norm = squared_norm(gradients).to(losses.device) if gradients else losses.new_zeros(())
    sums = torch.cat([losses, norm[None]])
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
    return StepStats(loss=loss, grad_norm=metrics.pop("") ** 0.5, metrics=metrics)


def non_finite_names(named: Mapping[str, Tensor], world_size: int) -> list[str]:
    """Parameters whose gradient is NaN or infinite on any rank."""
    flags = (~local_norms(named.values()).isfinite()).float()
    if world_size > 1:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [name for name, flag in zip(named, flags.tolist(), strict=True) if flag]


def set_last(model: FSDPModule, is_last: bool) -> None:
    """Let the next backward pass reduce gradients over ranks, or leave that to a later one."""
    model.set_requires_gradient_sync(is_last)
    model.set_is_last_backward(is_last)


def _backward(
    model: nn.Module, batch: Microbatch, loss: LossSpec, counts: GlobalCounts, temperature: float, errors: DeferredErrors
) -> tuple[LossOutput, Tensor]:
    if has_value_head(model):
        values = packed_values(model, batch.tokens, batch.packed)
        logprobs, output = values, errors.evaluate(loss, batch, torch.zeros_like(values), None, counts, values)
    else:
        logprobs, entropy = packed_logprobs(
            model,
            batch.tokens,
            batch.packed,
            temperature=temperature,
            entropy=loss.entropy,
            kept=batch.kept,
            images=batch.images,
        )
        output = errors.evaluate(loss, batch, logprobs, entropy, counts)
    output.loss.backward()
    return LossOutput(loss=output.loss.detach(), sums=output.sums, maxima=output.maxima), logprobs.detach()


def _float64(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensor.double() for tensor in tensors.values()]


DIVIDED_BEFORE = ("tensor", "expert")
"""The dimensions of meshes that divide parameters before FSDP shards them, and whose ranks keep their own part's gradient."""


def reduces_every_microbatch(wanted: bool | None, parameters: Iterable[Tensor], memory_bytes: int | None) -> bool:
    """Return whether gradients are reduced in every microbatch: as the section wants, or where gradients that FSDP has not
    sharded yet would take more than MOST_HELD of the device's memory, None of a host's. A collective of all ranks."""
    if wanted is not None:
        return wanted
    if memory_bytes is None:
        return False
    held = sum(parameter.element_size() * held_elements(parameter) for parameter in parameters)
    return _on_any_rank(held > MOST_HELD * memory_bytes)


def held_elements(parameter: Tensor) -> int:
    """The elements that this rank has of a parameter while FSDP has gathered it."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    divided = [
        mesh.size(dim)
        for dim, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if name in DIVIDED_BEFORE and isinstance(placement, Shard)
    ]
    return parameter.numel() // prod(divided)


def _on_any_rank(flag: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    found = torch.tensor(int(flag), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)

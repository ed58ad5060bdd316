"""Passes over the tokens of several adapters: the frozen layers compute all of them, and each adapter its own.

A pass is a packed microbatch whose parts are microbatches of adapters. Each part has its adapter's weights and dropout, and its
loss has the function and the counts of its adapter's request.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlcore.spi import (
    ROUTED_EXPERTS,
    ForwardBackwardRequest,
    ForwardBackwardResult,
    LossOutput,
    TokenBatch,
    TrainerContext,
)
from rlcore.spi.arrays import offsets_of
from rlcore_fsdp2.adapters import AdaptedPart, Adapters, trained
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.export import whole
from rlcore_fsdp2.gradients import reduce, set_last
from rlcore_fsdp2.layout import ParallelLayout
from rlcore_fsdp2.parked_adapter import ParkedAdapter, copies
from rlcore_fsdp2.sharding import bounds_of, held_part, local
from rlcore_torchkit.head.logprobs import packed_logprobs
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.trainer.losses import evaluate, total
from rlcore_torchkit.trainer.microbatch import Microbatch, move
from rlcore_torchkit.trainer.step_stats import check_finite, check_state

HOOK = "forward_backward_together"
Place: TypeAlias = tuple[str, int]
"""An adapter's name, and the number of a microbatch in its piece."""


def divides_by_turns(adapters: Adapters, context: TrainerContext, config: Fsdp2Config, layout: ParallelLayout) -> bool:
    """Return whether layers see parts of a pass's tokens or of an adapter, or are compiled, so that adapters go by turns."""
    divides = layout.tensor > 1 or layout.context > 1
    return divides or adapters.pads_between or config.compile_layers or context.head != "tokens"


def goes_by_turns(piece: ForwardBackwardRequest) -> bool:
    """Return whether a piece has data that no pass of several adapters computes."""
    return any(
        batch.images is not None or batch.sampling_mask is not None or ROUTED_EXPERTS in batch.token_columns
        for batch in piece.microbatches
    )


def planned(
    pieces: Mapping[str, ForwardBackwardRequest], num_tokens: Mapping[Place, int], max_tokens: int | None
) -> list[list[Place]]:
    """Divide the microbatches among passes of at most `max_tokens` tokens, of any number where it is None, and one that is
    larger by itself: each into the first
    pass with room for it, whose log-probabilities are of its temperature and come with entropies or without as its own."""
    passes: list[tuple[object, int, list[Place]]] = []
    for place, size in num_tokens.items():
        piece = pieces[place[0]]
        kind = piece.temperature, piece.loss.entropy
        for number, (other, held, places) in enumerate(passes):
            if other == kind and (max_tokens is None or held + size <= max_tokens):
                passes[number] = kind, held + size, [*places, place]
                break
        else:
            passes.append((kind, size, [place]))
    return [places for _, _, places in passes]


@frozen(kw_only=True, eq=False)
class AdaptersTogether:
    """The adapters of a request on this rank, and their gradients as they come."""

    model: nn.Module
    adapters: Adapters
    layout: ParallelLayout
    device: torch.device
    pieces: Mapping[str, ForwardBackwardRequest]
    parked: Mapping[str, ParkedAdapter]
    """The adapters of the pieces, whose gradients are copies."""
    _leaves: dict[str, dict[str, Tensor]] = field(init=False)
    """Whole A and B of each adapter, in the dtype of its parameters, on the device."""
    _logprobs: dict[Place, Tensor] = field(factory=dict, init=False)
    """float32 [T] of each microbatch."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        adapters: Adapters,
        layout: ParallelLayout,
        device: torch.device,
        pieces: Mapping[str, ForwardBackwardRequest],
        parked: Mapping[str, ParkedAdapter],
    ) -> "AdaptersTogether":
        """Gather the adapters of the pieces among those of `parked`. ContractError where one has another version."""
        own = {}
        for name, piece in pieces.items():
            one = parked[name]
            check_state(HOOK, piece.weight_version, one.weight_version, failed_midway=False)
            own[name] = one.with_own_gradients() if piece.piece else one.without_gradients()
        return cls(model=model, adapters=adapters, layout=layout, device=device, pieces=pieces, parked=own)

    @_leaves.default
    def _gathered(self) -> dict[str, dict[str, Tensor]]:
        parameters = trained(self.model)
        leaves = {
            adapter: {name: self._leaf(parameters[name], weights) for name, weights in one.weights.items()}
            for adapter, one in self.parked.items()
        }
        for adapter, one in self.parked.items():
            for name, gradient in {} if self.layout.world_size > 1 else one.gradients.items():
                leaves[adapter][name].grad = local(gradient).to(self.device)  # what the passes add to
        return leaves

    def _leaf(self, parameter: Tensor, weights: Tensor) -> Tensor:
        if not isinstance(parameter, DTensor):
            return weights.to(self.device, parameter.dtype).detach().requires_grad_()
        return whole(_like(parameter, weights), parameter.dtype, self.device).detach().requires_grad_()

    def run(self, max_tokens: int | None) -> tuple[dict[str, ForwardBackwardResult], dict[str, ParkedAdapter]]:
        """Make the passes. Return the figures of the pieces, and the adapters with the pieces' gradients added. NonFiniteError
        where a figure of one is NaN or infinite."""
        batches = {(name, number): one for name, piece in self.pieces.items() for number, one in enumerate(piece.microbatches)}
        outputs: dict[Place, LossOutput] = {}
        try:
            for places in planned(self.pieces, self._sizes(batches), max_tokens):
                outputs |= self._pass({place: batches[place] for place in places})
        finally:
            self.adapters.train_off()
        numbers = {name: range(len(piece.microbatches)) for name, piece in self.pieces.items()}
        totals = {name: total([outputs[name, number] for number in own]) for name, own in numbers.items()}
        results = {}
        for name, piece in self.pieces.items():
            stats = reduce(totals[name], (), self.layout)
            check_finite(stats, piece.weight_version, hook=f"{HOOK} of the adapter {name!r}")
            arrays = [self._logprobs[name, number].cpu().numpy() for number in numbers[name]]
            results[name] = ForwardBackwardResult(
                loss=stats.loss,
                metrics=stats.metrics,
                logprobs=tuple(arrays) if piece.logprobs else None,
                weight_version=piece.weight_version,
            )
        return results, self._with_gradients()

    def _sizes(self, batches: Mapping[Place, TokenBatch]) -> dict[Place, int]:
        """Return the tokens of each microbatch on the rank that has most, so that all ranks make as many passes."""
        sizes = torch.tensor([one.num_tokens for one in batches.values()], device=self.device)
        if self.layout.world_size > 1:
            dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        return dict(zip(batches, sizes.tolist(), strict=True))

    def _pass(self, batches: Mapping[Place, TokenBatch]) -> dict[Place, LossOutput]:
        """Add the gradients of one pass to the leaves' `.grad`. Return the losses without a gradient."""
        places, pieces = [*batches], [self.pieces[name] for name, _ in batches]
        moved = [move(one, self.device, own.loss.token_columns) for one, own in zip(batches.values(), pieces, strict=True)]
        self.adapters.train_together([self._part(*place, one) for place, one in zip(places, moved, strict=True)])
        if isinstance(self.model, FSDPModule):
            set_last(self.model, True)
        found, entropies = packed_logprobs(
            self.model,
            torch.cat([one.tokens for one in moved]),
            _packed([*batches.values()], self.device),
            temperature=pieces[0].temperature,
            entropy=pieces[0].loss.entropy,
        )
        bounds = offsets_of([len(one.tokens) for one in moved]).tolist()
        outputs = {}
        for place, piece, batch, (start, stop) in zip(places, pieces, moved, pairwise(bounds), strict=True):
            entropy = None if entropies is None else entropies[start:stop]
            outputs[place] = evaluate(piece.loss, batch, found[start:stop], entropy, piece.counts)
            self._logprobs[place] = found[start:stop].detach()
        torch.autograd.backward([output.loss for output in outputs.values()])
        return {place: evolve(output, loss=output.loss.detach()) for place, output in outputs.items()}

    def _part(self, name: str, number: int, batch: Microbatch) -> AdaptedPart:
        one, layout = self.parked[name], self.layout
        key = (
            self.pieces[name].weight_version,
            layout.data.data_parallel_rank,
            layout.context_rank,
            one.num_accumulated + number,
        )
        dropout = self.adapters.dropout(one.seed, len(batch.tokens), *key)
        return AdaptedPart(weights=self._leaves[name], dropout=dropout, rank=one.rank)

    def _with_gradients(self) -> dict[str, ParkedAdapter]:
        """Return the adapters with this rank's parts of the gradients, summed over the ranks."""
        if self.layout.world_size > 1:
            _sum_over_ranks([leaf.grad for leaves in self._leaves.values() for leaf in leaves.values()])
        parameters, found = trained(self.model), {}
        for name, piece in self.pieces.items():
            one, leaves = self.parked[name], self._leaves[name]
            parts = [self._own_part(key, parameters[key], leaf, one) for key, leaf in leaves.items()]
            gradients = {key: _like(parameters[key], part) for key, part in zip(leaves, copies(parts), strict=True)}
            found[name] = evolve(one, gradients=gradients, num_accumulated=one.num_accumulated + len(piece.microbatches))
        return found

    def _own_part(self, name: str, parameter: Tensor, leaf: Tensor, one: ParkedAdapter) -> Tensor:
        assert leaf.grad is not None, "every part of a pass uses all layers"
        if not isinstance(parameter, DTensor):
            return leaf.grad.to(parameter.device)
        part = leaf.grad[bounds_of(held_part(name, parameter))].to(local(parameter).device)
        if self.layout.world_size > 1 and name in one.gradients:
            part = part + local(one.gradients[name])
        return part


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is divided as a parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride())


def _sum_over_ranks(gradients: Sequence[Tensor | None]) -> None:
    """Add up tensors of one dtype in place, in one collective."""
    present = [gradient for gradient in gradients if gradient is not None]
    flat = torch.cat([gradient.flatten() for gradient in present])
    dist.all_reduce(flat)
    for gradient, summed in zip(present, flat.split([gradient.numel() for gradient in present]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def _packed(batches: Sequence[TokenBatch], device: torch.device) -> PackedSequences:
    lengths = [batch.lengths for batch in batches]
    owners = np.repeat(np.arange(len(batches)), [len(one) for one in lengths])
    packed = PackedSequences.from_offsets(offsets_of(np.concatenate(lengths)), device, owners)
    _ = packed.predicting  # copied now: later the copy would wait for all that the device has queued by then
    return packed

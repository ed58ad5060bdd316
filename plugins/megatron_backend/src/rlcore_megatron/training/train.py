"""Passes of the microbatches through the stages: with losses and gradients, or for log-probabilities alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rlcore.spi import ContractError, GlobalCounts, Head, LogprobsRequest, LossOutput, LossSpec, TokenBatch, ValuesRequest
from rlcore.spi.arrays import Float32Array
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.layouts.layout_check import FLOAT8_MULTIPLE
from rlcore_megatron.layouts.parallel import Groups
from rlcore_megatron.modules.auxiliary_loss import AuxiliaryLosses
from rlcore_megatron.modules.model import PolicyModel, unwrapped
from rlcore_megatron.modules.multi_token_head import lent_embedding
from rlcore_megatron.modules.packing import ForwardOptions, PackedBatch, empty_like, pack
from rlcore_megatron.modules.routing_replay import replay_of
from rlcore_megatron.modules.token_dispatch import forget_tokens
from rlcore_torchkit.layers.routing_replay import RoutingReplay
from rlcore_torchkit.trainer.losses import DeferredErrors, Totals
from rlcore_torchkit.trainer.microbatch import Microbatch, move

MTP_LOSS = "mtp_loss"
"""The metric of the multi-token head's loss."""
LossSums = tuple[float, dict[str, float], dict[str, float]]


@frozen(kw_only=True, eq=False)
class Passes:
    """Runs microbatches through one model's parts."""

    models: Sequence[Any]
    layout: ParallelLayout
    groups: Groups
    device: torch.device
    head: Head = "tokens"
    mtp_loss_weight: float | None = None
    """The factor of the loss of the model's multi-token head; None where it has none."""

    @property
    def _replay(self) -> RoutingReplay:
        return replay_of(unwrapped(self.models))

    @property
    def _auxiliary(self) -> AuxiliaryLosses:
        return AuxiliaryLosses.of(unwrapped(self.models), self.groups)

    def train(
        self,
        microbatches: Sequence[Microbatch],
        loss: LossSpec,
        counts: GlobalCounts,
        temperature: float,
        errors: DeferredErrors,
        logprobs: list[Tensor] | None = None,
        prepare: Callable[[Any, int, Microbatch], None] | None = None,
    ) -> list[LossOutput]:
        """Add up the gradients of the microbatches' losses, over all ranks too; return this data-parallel rank's losses on the
        last stage, nothing before it. There each microbatch's log-probabilities [1, T] are added to `logprobs`, and the loss's
        errors to `errors`. `prepare` is called with each microbatch and its number before a model runs it."""
        mtp = self.mtp_loss_weight
        wanted = ForwardOptions(temperature=temperature, entropy=loss.entropy, ahead=mtp is not None)
        outputs: list[LossOutput] = []
        self._auxiliary.begin(microbatches)
        self._replay.begin()

        def reduce(batch: Microbatch, is_filler: bool, result: Tensor) -> tuple[Tensor, Tensor, None]:
            if is_filler:
                return result.sum() * 0.0, _no_tokens(), None
            if self.head == "value":
                output = errors.evaluate(loss, batch, torch.zeros_like(result[0]), None, counts, result[0])
            else:
                output = errors.evaluate(loss, batch, result[0], None if loss.entropy == "none" else result[1], counts)
            if logprobs is not None:
                logprobs.append(result[:1].detach())
            outputs.append(evolve(output, loss=output.loss.detach()))
            if mtp is None:
                return output.loss, _no_tokens(), None
            added = mtp_loss(result[-1], batch, counts)
            outputs[-1] = evolve(outputs[-1], sums={**output.sums, MTP_LOSS: added.detach()})
            return output.loss + mtp * added, _no_tokens(), None

        with nullcontext() if mtp is None else lent_embedding(unwrapped(self.models), self.layout, self.groups):
            self._run(microbatches, wanted, reduce, forward_only=False, prepare=prepare)
        return outputs

    def router_metrics(self, microbatches: Sequence[TokenBatch]) -> dict[str, float]:
        """The routers' metrics of the microbatches that `train` has run, on every rank."""
        replay = self._replay.metrics(microbatches, self.device, self.layout.world_size)
        return self._auxiliary.metrics() | replay

    def logprobs(self, request: LogprobsRequest) -> tuple[tuple[Float32Array, ...], tuple[Float32Array, ...] | None]:
        """float32 [T] for each microbatch, and the entropies or None, on every rank."""
        if not request.microbatches:
            return (), () if request.entropy else None
        microbatches = [move(batch, self.device, ()) for batch in request.microbatches]
        if request.model == "reference":  # which routes itself, and with adapters is the policy's own model
            microbatches = [evolve(batch, token_columns={}) for batch in microbatches]
        wanted = ForwardOptions(temperature=request.temperature, entropy="metric" if request.entropy else "none")
        parts = self._without_gradient(microbatches, wanted)
        return parts[0], parts[1] if request.entropy else None

    def values(self, request: ValuesRequest) -> tuple[Float32Array, ...]:
        """float32 [T] for each microbatch, on every rank."""
        microbatches = [move(batch, self.device, ()) for batch in request.microbatches]
        return self._without_gradient(microbatches, ForwardOptions(temperature=1.0, entropy="none"))[0]

    def _without_gradient(self, microbatches: Sequence[Microbatch], wanted: ForwardOptions) -> list[tuple[Float32Array, ...]]:
        """Return the last stage's results for each microbatch, by their rows, float32 [T] each, on every rank."""
        found: list[Tensor] = []

        def keep(_: Microbatch, is_filler: bool, result: Tensor) -> tuple[Tensor, Tensor, None]:
            if not is_filler:
                found.append(result)
            return result.sum(), _no_tokens(), None

        with torch.no_grad():
            self._run(microbatches, wanted, keep, forward_only=True)
        lengths = [batch.packed.num_tokens for batch in microbatches]
        return self.on_every_stage(found, lengths, num_rows=1 if wanted.entropy == "none" else 2)

    def on_every_stage(self, found: Sequence[Tensor], lengths: Sequence[int], num_rows: int) -> list[tuple[Float32Array, ...]]:
        """Each row of what the last stage has for each microbatch, float32 [rows, T], on every rank."""
        whole = torch.cat([*found], 1) if found else torch.empty(num_rows, sum(lengths), device=self.device)
        if self.layout.pipeline > 1:
            dist.broadcast(whole, group=self.groups.pipeline, group_src=self.layout.pipeline - 1)
        return [tuple(np.split(row, np.cumsum(lengths)[:-1])) for row in whole.cpu().numpy()]

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        wanted: ForwardOptions,
        reduce: Callable[..., Any],
        *,
        forward_only: bool,
        prepare: Callable[[Any, int, Microbatch], None] | None = None,
    ) -> None:
        queued = [(batch, False) for batch in microbatches]
        if self.layout.virtual_pipeline > 1:
            # Interleaved stages take turns in rounds of one microbatch for each stage.
            missing = -len(queued) % self.layout.pipeline
            queued += [(empty_like(microbatches[0]), True)] * missing

        def forward(batches: Iterator[tuple[int, tuple[Microbatch, bool]]], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            index, (batch, is_filler) = next(batches)
            if prepare is not None:
                prepare(model, index, batch)
            (chunk,) = unwrapped([model])
            packed = self._pack(chunk, batch, wanted, is_filler)
            output = model(packed.tokens, None, None, packed_seq_params=packed)
            return output, partial(reduce, batch, is_filler)

        models = list(self.models)
        iterators = [iter(enumerate(queued)) for _ in models]
        try:
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iterators if len(models) > 1 else iterators[0],
                model=models if len(models) > 1 else models[0],
                num_microbatches=len(queued),
                seq_length=max(batch.packed.num_tokens for batch, _ in queued),  # of no effect: lengths vary
                micro_batch_size=1,
                forward_only=forward_only,
            )
        finally:  # after an error too: what comes next, such as a checkpoint, needs the memory
            forget_tokens(self.models)

    def _pack(self, chunk: PolicyModel, batch: Microbatch, wanted: ForwardOptions, is_filler: bool) -> PackedBatch:
        config = self.models[0].config
        divided = config.tensor_model_parallel_size if config.sequence_parallel else 1
        multiple = divided * (FLOAT8_MULTIPLE if config.fp8 else 1)
        if chunk.reader is None and batch.images is not None:
            raise ContractError("images: found some, for a model that reads text alone; expected none")
        images = None if chunk.reader is None else chunk.reader.read(batch, has_pixels=chunk.vision is not None)
        return pack(batch, self.groups.context, multiple, wanted, images=images, is_filler=is_filler)


def mtp_loss(logprobs: Tensor, batch: Microbatch, counts: GlobalCounts) -> Tensor:
    """The multi-token head's cross-entropy, from its log-probabilities float32 [T], added up over the microbatch's loss tokens
    and divided by the step's. The second token of a sequence counts as 0: no head's state comes two tokens before it."""
    return -torch.where(batch.loss_mask, logprobs, 0.0).sum() / max(counts.num_loss_tokens, 1)


def _no_tokens() -> Tensor:
    return torch.zeros((), dtype=torch.int, device=torch.cuda.current_device())


def reduce_totals(totals: Totals | None, layout: ParallelLayout, groups: Groups) -> LossSums:
    """Loss, sums and maxima over all data-parallel ranks, on every rank."""
    reduced: list[Any] = [None]
    if totals is not None:
        names = [*totals.sums]
        sums = torch.stack([totals.loss, *(totals.sums[name].double() for name in names)])
        maxima = torch.stack([value.double() for value in totals.maxima.values()]) if totals.maxima else sums.new_zeros(0)
        if layout.data > 1:
            dist.all_reduce(sums, group=groups.data)
            if totals.maxima:
                dist.all_reduce(maxima, dist.ReduceOp.MAX, groups.data)
        loss, *values = sums.tolist()
        reduced = [(loss, dict(zip(names, values, strict=True)), dict(zip(totals.maxima, maxima.tolist(), strict=True)))]
    if layout.pipeline > 1:
        dist.broadcast_object_list(reduced, group=groups.pipeline, group_src=layout.pipeline - 1)
    result: LossSums = reduced[0]
    return result

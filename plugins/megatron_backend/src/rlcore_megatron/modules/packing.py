"""A packed microbatch as Megatron's layers take it: this rank's tokens, where they belong, and the sequences' bounds."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, frozen
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rlcore.spi import ROUTED_EXPERTS
from rlcore_torchkit.forward.context_parallel import ContextPart
from rlcore_torchkit.forward.image_forward import ShownImages
from rlcore_torchkit.head.logprobs import EntropyMode
from rlcore_torchkit.layers.attention import PackedSequences
from rlcore_torchkit.trainer.microbatch import Microbatch


@frozen(kw_only=True, eq=False)
class ForwardOptions:
    """Options of what the last stage computes from the hidden states."""

    temperature: float
    entropy: EntropyMode
    ahead: bool = False
    """True where the multi-token head, which the model has, computes log-probabilities too."""


@dataclass
class PackedBatch(PackedSeqParams):
    """Travels through the model in the place of Megatron's own record, to our attention, rotary embedding and head.

    T tokens of the microbatch, S of them (padding included) on this context rank.
    """

    batch: Microbatch | None = None
    part: ContextPart | None = None
    tokens: Tensor | None = None
    """int64 [1, S], of this rank."""
    positions: Tensor | None = None
    """int64 [S], from 0 in every sequence."""
    images: ShownImages | None = None
    """The images of the microbatch, on the host; None where there are none."""
    grid_positions: Tensor | None = None
    """int64 [3, S]: time, height and width of each token; None where each is `positions`."""
    placed: Any = None
    """The PlacedFeatures that layers of the first stage add; None where they add none."""
    wanted: ForwardOptions | None = None
    routed: Tensor | None = None
    """int16 [L, K, S]: the experts that each token is sent to in each of all L layers; where it is -1, and everywhere if this
    is None, the router chooses."""
    selected: dict[int, Tensor | None] = field(default_factory=dict)
    """int32 [T, K] by a layer's number: the keys that its indexer has chosen for each query; None where these are all."""
    is_filler: bool = False
    """True where it only fills up the microbatches of an interleaved pipeline."""

    @cached_property
    def sequences(self) -> Tensor:
        """int64 [S]: the number of each token's sequence in the microbatch; -1 for padding, and for all of a filler."""
        assert self.part is not None
        starts = self.part.packed.position_ids[0] == 0
        numbers = self.part.split(starts.cumsum(0)) - 1
        return torch.full_like(numbers, -1) if self.is_filler else numbers


def pack(
    batch: Microbatch,
    group: dist.ProcessGroup,
    multiple: int,
    wanted: ForwardOptions,
    *,
    images: ShownImages | None = None,
    is_filler: bool = False,
) -> PackedBatch:
    """This context rank's equal share of the tokens, a multiple of `multiple` in size, as sequence parallelism divides it."""
    part = ContextPart.of(batch.packed, group, multiple)
    routed = batch.token_columns.get(ROUTED_EXPERTS)
    return PackedBatch(
        qkv_format="sbhd",  # the layers see one long sequence; the attention alone knows of its parts
        batch=batch,
        part=part,
        tokens=part.split(batch.tokens.long()[None]),
        positions=part.split(batch.packed.position_ids)[0],
        images=images,
        grid_positions=None if images is None else part.split(images.positions[:, 0].to(batch.tokens.device)),
        wanted=wanted,
        routed=None if routed is None else part.split(routed.permute(1, 2, 0) + 1) - 1,
        is_filler=is_filler,
    )


def empty_like(batch: Microbatch) -> Microbatch:
    """One sequence of two tokens that no loss reads: fills up the microbatches of interleaved pipelines."""
    offsets = torch.tensor([0, 2])
    packed = PackedSequences.from_offsets(offsets, batch.tokens.device)
    tokens = torch.zeros(2, dtype=batch.tokens.dtype, device=batch.tokens.device)
    own = {"tokens": tokens, "packed": packed, "offsets": offsets.to(tokens.device)}
    return evolve(batch, **own, token_columns={}, kept=None, images=None)

"""A packed microbatch on the trainer's device."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi.batch import ROUTED_EXPERTS, Images, TokenBatch
from rlcore.spi.errors import ContractError
from rlcore_torchkit.head.sampling_mask import KeptTokens
from rlcore_torchkit.layers.attention import PackedSequences


@frozen(kw_only=True, eq=False)
class Microbatch:
    """T tokens of N sequences, and what a loss reads besides."""

    tokens: Tensor
    """int32 [T]"""
    packed: PackedSequences
    offsets: Tensor
    """int64 [N+1]"""
    loss_mask: Tensor
    """bool [T]"""
    token_columns: Mapping[str, Tensor]
    """[T] each, as a rule."""
    sequence_columns: Mapping[str, Tensor]
    """One array [N] for each name that the loss asked for."""
    kept: KeptTokens | None = None
    """The tokens that the softmax of each of the T tokens is over; None where it is the whole vocabulary everywhere."""
    images: Images | None = None
    """Files of the images that each of the N sequences reads; None where there are none."""


def move(batch: TokenBatch, device: torch.device, token_columns: Sequence[str]) -> Microbatch:
    """Copy a batch to the device, with those of its token columns that are read, and ROUTED_EXPERTS where it has that column;
    ContractError where one is missing."""
    missing = [name for name in token_columns if name not in batch.token_columns]
    if missing:
        raise ContractError(f"microbatch: found token columns {sorted(batch.token_columns)}; expected {missing} too")
    routed = {ROUTED_EXPERTS} & batch.token_columns.keys()
    packed = PackedSequences.from_offsets(batch.offsets, device)
    _ = packed.predicting  # copied now: later the copy would wait for all that the device has queued by then
    if device.type == "cpu":
        _ = packed.plan  # made now: what compiles layers cannot look into its making
    return Microbatch(
        tokens=_tensor(batch.tokens, device),
        packed=packed,
        offsets=_tensor(batch.offsets, device),
        loss_mask=_tensor(batch.loss_mask, device),
        token_columns={name: _tensor(batch.token_columns[name], device) for name in (*token_columns, *routed)},
        sequence_columns={name: _tensor(column, device) for name, column in batch.sequence_columns.items()},
        kept=None if batch.sampling_mask is None else KeptTokens.of(batch.sampling_mask, device),
        images=batch.images,
    )


def _tensor(array: "np.ndarray[Any, Any]", device: torch.device) -> Tensor:
    # A copy on CPU too: the arrays may be read-only, and a loss function must not reach the driver's data.
    return torch.tensor(array, device=device)

"""Bounds of packed sequences, and the batched calls that their attention is cut into.

Beginnings that sequences have in common, as samples have their prompt, are computed once: what a causal model makes of a token
depends on that token and those before it alone.

Shapes: T tokens of the packed microbatch, N sequences, R rows that the model computes for them.
"""

from functools import cached_property

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi.arrays import Int64Array, check_offsets
from rlcore.spi.errors import ContractError

_BUCKET_SLACK_TOKENS = 16
_BUCKET_SLACK_SHARE = 0.25


@frozen(kw_only=True, eq=False)
class SequenceBucket:
    """Sequences of similar length, which one batched attention call handles."""

    num_sequences: int
    length: int
    """Tokens of its longest sequence, to which the others are padded on the right."""
    gather: Tensor
    """int64 [num_sequences * length]: the packed token at each place; a sequence's last token is repeated as padding."""


@frozen(kw_only=True, eq=False)
class AttentionPlan:
    """The batched calls that per-sequence attention is cut into."""

    buckets: tuple[SequenceBucket, ...]
    restore: Tensor
    """int64 [T]: where each packed token is in the concatenation of the buckets' places."""


@frozen(kw_only=True, eq=False)
class PackedSequences:
    """Bounds of the sequences of one packed microbatch; made once a microbatch and used by every layer."""

    offsets: Int64Array
    """int64 [N+1], on the host: sequence n is the tokens offsets[n] to offsets[n+1]."""
    device: torch.device
    cu_seqlens: Tensor
    """int32 [N+1]: the same offsets, on the device."""
    position_ids: Tensor
    """int64 [1, T], on the device: from 0 in every sequence."""
    max_length: int
    """Tokens of the longest sequence."""
    owners: Int64Array | None = None
    """int64 [N], ascending from 0: the one of several models that computes each sequence; None where one computes all."""

    @classmethod
    def from_offsets(
        cls, offsets: "Int64Array | Tensor", device: torch.device | str, owners: Int64Array | None = None
    ) -> "PackedSequences":
        """The bounds of sequences by their offsets, int64 [N+1] on the host, from 0 to T; ContractError where one is empty."""
        host = offsets.cpu().numpy() if isinstance(offsets, Tensor) else offsets
        check_offsets("offsets", host, int(host[-1]) if len(host) else 0, allow_empty=False)
        if len(host) < 2:
            raise ContractError("offsets: found no sequence; expected at least one")
        lengths = np.diff(host)
        positions = np.arange(host[-1], dtype=np.int64) - np.repeat(host[:-1], lengths)
        return cls(
            offsets=host,
            device=torch.device(device),
            cu_seqlens=torch.from_numpy(host.astype(np.int32)).to(device),
            position_ids=torch.from_numpy(positions).to(device)[None],
            max_length=int(lengths.max()),
            owners=owners,
        )

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def rows_of_owners(self) -> list[int]:
        """Return the number of consecutive rows that a model is given of each owner."""
        assert self.owners is not None, "of several models"
        return [*map(int, np.bincount(np.repeat(self.owners, np.diff(self.offsets))))]

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def predicting(self) -> Tensor:
        """int64 [T - N], on the device: the positions whose next token belongs to the same sequence."""
        predicts = np.ones(self.num_tokens, np.bool_)
        predicts[self.offsets[1:] - 1] = False
        return torch.from_numpy(np.flatnonzero(predicts)).to(self.device)

    @cached_property
    def plan(self) -> AttentionPlan | None:
        """Buckets of similar length for batched attention; None where all sequences are equally long already."""
        return attention_plan(self.offsets, self.device)


def attention_plan(offsets: Int64Array, device: torch.device) -> AttentionPlan | None:
    """Buckets for the sequences with these offsets, int64 [N+1]; None where all are equally long."""
    lengths = np.diff(offsets)
    if lengths.min() == lengths.max():
        return None
    restore = np.empty(int(offsets[-1]), np.int64)
    buckets, num_places = [], 0
    for members in _similar_lengths(lengths):
        longest = int(lengths[members[0]])
        within, own = np.arange(longest), lengths[members, None]
        gather = (offsets[members, None] + np.minimum(within, own - 1)).reshape(-1)
        real = np.flatnonzero(within < own)
        restore[gather[real]] = num_places + real
        num_places += len(gather)
        buckets.append(SequenceBucket(num_sequences=len(members), length=longest, gather=torch.from_numpy(gather).to(device)))
    return AttentionPlan(buckets=tuple(buckets), restore=torch.from_numpy(restore).to(device))


@frozen(kw_only=True, eq=False)
class SharedSequences(PackedSequences):
    """Packed sequences of which the model computes R rows in place of T tokens, on CPU."""

    first: Tensor
    """int64 [R]: a packed token of each row."""
    rows: Tensor
    """int64 [T]: the row of each packed token."""

    @classmethod
    def of(cls, packed: PackedSequences, first: Tensor, rows: Tensor) -> "SharedSequences":
        """`packed` by such rows."""
        return cls(
            offsets=packed.offsets,
            device=packed.device,
            cu_seqlens=packed.cu_seqlens,
            position_ids=packed.position_ids.index_select(1, first),
            max_length=packed.max_length,
            owners=packed.owners,
            first=first,
            rows=rows,
        )

    @property
    def num_tokens(self) -> int:
        """R: what a model is given."""
        return len(self.first)

    @property
    def rows_of_owners(self) -> list[int]:
        """Return the number of consecutive rows that a model is given of each owner."""
        assert self.owners is not None, "of several models"
        owners = np.repeat(self.owners, np.diff(self.offsets))
        return [*map(int, np.bincount(owners[self.first.numpy()]))]

    @cached_property
    def plan(self) -> AttentionPlan:
        """Plan which rows each sequence reads; tokens that share a row attend alike, and one of them is kept."""
        plan = attention_plan(self.offsets, self.device)
        if plan is None:
            whole = SequenceBucket(num_sequences=self.num_sequences, length=self.max_length, gather=self.rows)
            return AttentionPlan(buckets=(whole,), restore=self.first)
        buckets = (
            SequenceBucket(num_sequences=bucket.num_sequences, length=bucket.length, gather=self.rows[bucket.gather])
            for bucket in plan.buckets
        )
        return AttentionPlan(buckets=tuple(buckets), restore=plan.restore[self.first])


def _similar_lengths(lengths: Int64Array) -> list[Int64Array]:
    """Groups of sequence indices, longest first, in which padding to the longest costs little."""
    order = np.argsort(-lengths, kind="stable")
    groups, start = [], 0
    while start < len(order):
        longest = int(lengths[order[start]])
        shortest = min(longest * (1 - _BUCKET_SLACK_SHARE), longest - _BUCKET_SLACK_TOKENS)
        end = int(np.searchsorted(-lengths[order], -shortest, side="right"))
        groups.append(order[start:end])
        start = end
    return groups

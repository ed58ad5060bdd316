"""Beginnings that sequences of a microbatch have in common, as samples have their prompt, computed once for all of them.

What a causal model makes of a token depends on that token and those before it alone. Shapes: T packed tokens, R rows that
differ in that.
"""

from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

from rlcore.spi.arrays import Int64Array
from rlcore_torchkit.attention import AttentionPlan, PackedSequences, SequenceBucket, attention_plan, packed_forward

Tokens: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int32 | np.int64]]"
WORTHWHILE = 0.95
"""Rows by tokens up to which beginnings are shared: gathering costs a little as well."""


def shared_forward(model: nn.Module, tokens: Tensor, packed: PackedSequences) -> Tensor:
    """Hidden states [T, hidden], as `packed_forward` computes them, by a row for each beginning in place of each token.

    On CPU alone; elsewhere, and where sequences have little in common, it is `packed_forward`. Nothing in the model may tell
    one token from another with the same beginning, as dropout does.
    """
    if tokens.device.type != "cpu":
        return packed_forward(model, tokens, packed)
    first, rows = common_beginnings(tokens.numpy(), packed.offsets)
    if len(first) > WORTHWHILE * len(rows):
        return packed_forward(model, tokens, packed)
    shared = SharedSequences.of(packed, torch.from_numpy(first), torch.from_numpy(rows))
    _ = shared.plan  # made now: what compiles layers cannot look into its making
    return packed_forward(model, tokens.index_select(0, shared.first), shared).index_select(0, shared.rows)


def common_beginnings(tokens: Tokens, offsets: Int64Array) -> tuple[Int64Array, Int64Array]:
    """int64 [R]: a packed token of each row; and int64 [T]: the row of each packed token. Two tokens have one row where they,
    and all before them in their sequences, are the same."""
    sequences = [tokens[start:end] for start, end in pairwise(offsets)]
    # In the order of their bytes, sequences with a common beginning are neighbours; which order that is does not matter.
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].tobytes())
    rows, first = np.empty(len(tokens), np.int64), []
    num_rows, before = 0, order[0]
    for index in order:
        start, end = int(offsets[index]), int(offsets[index + 1])
        common = 0 if index == before else _common(sequences[before], sequences[index])
        rows[start : start + common] = rows[offsets[before] : offsets[before] + common]
        rows[start + common : end] = np.arange(num_rows, num_rows + end - start - common)
        first.append(np.arange(start + common, end))
        num_rows, before = num_rows + end - start - common, index
    return np.concatenate(first), rows


def _common(one: Tokens, other: Tokens) -> int:
    """Tokens of the common beginning."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


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
            first=first,
            rows=rows,
        )

    @property
    def num_tokens(self) -> int:
        """R: what a model is given."""
        return len(self.first)

    @cached_property
    def plan(self) -> AttentionPlan:
        """Each sequence reads the rows of its tokens; of tokens that share one, which attend alike, one is kept."""
        plan = attention_plan(self.offsets, self.device)
        if plan is None:
            whole = SequenceBucket(num_sequences=self.num_sequences, length=self.max_length, gather=self.rows)
            return AttentionPlan(buckets=(whole,), restore=self.first)
        buckets = (
            SequenceBucket(num_sequences=bucket.num_sequences, length=bucket.length, gather=self.rows[bucket.gather])
            for bucket in plan.buckets
        )
        return AttentionPlan(buckets=tuple(buckets), restore=plan.restore[self.first])

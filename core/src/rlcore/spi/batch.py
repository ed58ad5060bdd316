"""Packed token data: ragged, columnar, in numpy; there is no padding anywhere in the system.

Per-token columns are aligned with the token that they describe: `logprobs[t]` is the log-probability of `tokens[t]` given
the tokens of its sequence before it. The first token of a sequence has none: 0.0 there, and `loss_mask` is False.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
from attrs import evolve, field, frozen

from rlcore.spi.arrays import (
    AnyArray,
    BoolArray,
    Int32Array,
    Int64Array,
    check_array,
    check_offsets,
    check_range,
    offsets_of,
    read_only,
    take_rows,
)
from rlcore.spi.errors import ContractError
from rlcore.spi.images import Images, check_images
from rlcore.spi.sampling_mask import SamplingMask

GENERATION_LOGPROBS = "generation_logprobs"
"""float32 [T]: log-probability under the distribution sampled from; 0.0 where loss_mask is False."""
PREVIOUS_LOGPROBS = "previous_logprobs"
"""float32 [T]: the trainer's log-probability at the start of the step. Only where LossSpec.previous_logprobs is "given"."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""float32 [T]: log-probability under the frozen reference; 0.0 where loss_mask is False."""
ADVANTAGES = "advantages"
"""float32 [T]: advantage of the token; 0.0 where loss_mask is False."""
VALUES = "values"
"""float32 [T]: what the critic expects to be earned after the token, at the weights that the step began with; at every token,
whatever loss_mask says. The value of the state in which token t was chosen is that of the token before it."""
WEIGHT_VERSIONS = "weight_versions"
"""int32 [T]: version of the weights that sampled the token; -1 where the token was not generated."""
ROUTED_EXPERTS = "routed_experts"
"""int16 [T, L, K]: the K experts that the generator sent the token to in each of all L layers of a mixture-of-experts model; -1
in layers without experts, and where no generator routed the token: the trainer then chooses itself."""

GROUP_IDS = "group_ids"
"""int32 [N], a sequence column: index of the prompt within the step; sequences of one group share a minibatch."""
MARGINS = "margins"
"""float32 [N], a sequence column: by how much the chosen answer of a pair is to be better, the same for its two sequences."""
EPISODE_IDS = "episode_ids"
"""int32 [N], a sequence column: index of the episode within the step, non-decreasing, where one may have several sequences. All
of them have its reward; an episode counts once in its group's statistics. Without it each sequence is an episode."""


@frozen(kw_only=True, eq=False)
class PackedTokens:
    """Token sequences one after another."""

    _allows_empty: ClassVar[bool] = False
    """True where a sequence may have no token."""

    tokens: Int32Array
    """int32 [T]"""
    offsets: Int64Array
    """int64 [N+1]: sequence n is tokens[offsets[n]:offsets[n+1]], at least one token."""

    def __attrs_post_init__(self) -> None:
        check_array("tokens", self.tokens, np.int32)
        check_offsets("offsets", self.offsets, len(self.tokens), allow_empty=self._allows_empty)

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64Array:
        """int64 [N]: tokens per sequence."""
        return np.diff(self.offsets)

    def sequences(self) -> list[Int32Array]:
        """[N]: a view of each sequence."""
        return [self.tokens[start:end] for start, end in pairwise(self.offsets.tolist())]

    def largest_token(self, where: BoolArray | bool = True) -> int:
        """The largest token id, of those where bool [T] is True; 0 where there is none."""
        return int(self.tokens.max(initial=0, where=where))

    def is_any_of(self, token_ids: Sequence[int]) -> BoolArray:
        """bool [T]: whether the token is one of these."""
        found = np.zeros(len(self.tokens), np.bool_)
        for token in token_ids:
            found |= self.tokens == token
        return found

    def check_tokens(self, name: str, upper: float = math.inf) -> None:
        """ContractError unless all token ids are from 0 to `upper`."""
        check_range(name, self.tokens, lower=0, upper=upper)


@frozen(kw_only=True, eq=False)
class RaggedTokens(PackedTokens):
    """Token sequences of different lengths."""

    @classmethod
    def from_lists(cls, sequences: Sequence[Sequence[int]]) -> "RaggedTokens":
        """Pack Python lists of token ids."""
        offsets = offsets_of([len(sequence) for sequence in sequences])
        flat = [np.asarray(sequence, np.int32) for sequence in sequences]
        return cls(tokens=np.concatenate(flat) if flat else np.zeros(0, np.int32), offsets=offsets)

    def sequence(self, index: int) -> Int32Array:
        """int32 [length]: a view of one sequence."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


@frozen(kw_only=True, eq=False)
class TokenBatch(PackedTokens):
    """Packed sequences with their loss mask and named columns."""

    loss_mask: BoolArray
    """bool [T]: True where the token takes part in the loss; never at the first token of a sequence."""
    token_columns: Mapping[str, AnyArray] = field(factory=dict)
    """Per-token columns, [T] or [T, ...] each, float32, int32, int16 or bool."""
    sequence_columns: Mapping[str, AnyArray] = field(factory=dict)
    """Per-sequence columns, [N] each, any numeric dtype or bool."""
    sampling_mask: SamplingMask | None = None
    """The tokens that each of the T tokens was chosen among, where truncated sampling left tokens out; None where it never
    did."""
    images: Images | None = None
    """The images that each of the N sequences reads; None where there are none. Needs the capability `images`."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_array("loss_mask", self.loss_mask, np.bool_, self.num_tokens)
        if self.loss_mask[self.offsets[:-1]].any():
            first = int(self.loss_mask[self.offsets[:-1]].argmax())
            raise ContractError(f"loss_mask: True at the first token of sequence {first}; it has no log-probability")
        for name, column in [*self.token_columns.items(), *self.sequence_columns.items()]:
            if not isinstance(column, np.ndarray):
                raise ContractError(f"column {name}: found {type(column).__name__}; expected a numpy array")
        for name, column in self.token_columns.items():
            if column.shape[:1] != (self.num_tokens,) or column.dtype not in (np.float32, np.int32, np.int16, np.bool_):
                found, expected = f"shape {list(column.shape)} of {column.dtype}", "float32/int32/int16/bool"
                raise ContractError(f"token column {name}: found {found}; expected [{self.num_tokens}] of {expected}")
        for name, column in self.sequence_columns.items():
            if column.shape != (self.num_sequences,) or column.dtype.kind not in "biuf":
                found, expected = f"{list(column.shape)} of {column.dtype}", f"[{self.num_sequences}], numbers or bool"
                raise ContractError(f"sequence column {name}: found {found}; expected {expected}")
        if self.sampling_mask is not None:
            self.sampling_mask.check_length(self.num_tokens)
        if self.images is not None:
            check_images(self.images, self.num_sequences)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def loss_lengths(self) -> Int64Array:
        """int64 [N]: tokens per sequence where loss_mask is True."""
        if self.num_sequences == 0:
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.loss_mask, self.offsets[:-1], dtype=np.int32).astype(np.int64)

    def counts(self) -> "GlobalCounts":
        """The counts of this batch alone; global when it is the whole optimizer step's batch."""
        lengths = self.loss_lengths
        return GlobalCounts(num_loss_tokens=int(lengths.sum()), num_loss_sequences=int(np.count_nonzero(lengths)))

    def select(self, indices: Int64Array) -> "TokenBatch":
        """A new batch of the sequences `indices` int64 [M], in that order; columns follow."""
        return TokenBatch(
            tokens=take_rows(self.tokens, self.offsets, indices),
            offsets=offsets_of(self.offsets[indices + 1] - self.offsets[indices]),
            loss_mask=take_rows(self.loss_mask, self.offsets, indices),
            token_columns={name: take_rows(column, self.offsets, indices) for name, column in self.token_columns.items()},
            sequence_columns={name: column[indices] for name, column in self.sequence_columns.items()},
            sampling_mask=None if self.sampling_mask is None else self.sampling_mask.take(self.offsets, indices),
            images=None if self.images is None else tuple(self.images[index] for index in indices.tolist()),
        )

    def read_only(self) -> "TokenBatch":
        """This batch with views of its arrays that nobody can write to."""
        mask = self.sampling_mask
        return evolve(
            self,
            tokens=read_only(self.tokens),
            offsets=read_only(self.offsets),
            loss_mask=read_only(self.loss_mask),
            token_columns={name: read_only(column) for name, column in self.token_columns.items()},
            sequence_columns={name: read_only(column) for name, column in self.sequence_columns.items()},
            sampling_mask=mask and evolve(mask, tokens=read_only(mask.tokens), offsets=read_only(mask.offsets)),
        )

    def with_token_column(self, name: str, column: AnyArray) -> "TokenBatch":
        """This batch with one more, or another, per-token column [T, ...]."""
        return evolve(self, token_columns={**self.token_columns, name: column})


@frozen(kw_only=True)
class GlobalCounts:
    """The divisors of losses: counts over the whole optimizer step, all microbatches and all ranks."""

    num_loss_tokens: int
    """Tokens where loss_mask is True."""
    num_loss_sequences: int
    """Sequences with at least one such token."""

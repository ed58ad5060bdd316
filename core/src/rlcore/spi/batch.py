"""Packed token data: ragged, columnar, in numpy; there is no padding anywhere in the system.

Per-token columns are aligned with the token that they describe: `logprobs[t]` is the log-probability of `tokens[t]` given
the tokens of its sequence before it. The first token of a sequence has none: 0.0 there, and `loss_mask` is False.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, TypeAlias

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


@frozen(kw_only=True, eq=False)
class SamplingMask:
    """The ids that truncated sampling kept, for each of T tokens ("Keep Sampling Mask", arXiv:2512.02556, section 3.1). Each
    token's distribution is the softmax over its kept ids. A threshold would not be exact, since a trainer's logits differ from
    the generator's by rounding. It takes 8 bytes a token, and 4 for each kept id."""

    tokens: Int32Array
    """int32 [M]: ids, each once a row, the token itself among them."""
    offsets: Int64Array
    """int64 [T+1]: token t was chosen among tokens[offsets[t]:offsets[t+1]]; among the whole vocabulary where that is empty."""

    def __attrs_post_init__(self) -> None:
        check_array("sampling mask", self.tokens, np.int32)
        check_offsets("sampling mask's offsets", self.offsets, len(self.tokens), allow_empty=True)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int64Array:
        """int64 [T]: kept tokens of each token; 0 stands for all."""
        return np.diff(self.offsets)

    @classmethod
    def of(cls, kept: Sequence[Int32Array]) -> "SamplingMask":
        """The kept tokens of each of T tokens, one array each."""
        tokens = np.concatenate([np.zeros(0, np.int32), *kept]).astype(np.int32, copy=False)
        return cls(tokens=tokens, offsets=offsets_of([len(row) for row in kept]))

    @classmethod
    def whole(cls, num_tokens: int) -> "SamplingMask":
        """Rows of tokens chosen among the whole vocabulary, or not chosen at all."""
        return cls(tokens=np.zeros(0, np.int32), offsets=np.zeros(num_tokens + 1, np.int64))

    @classmethod
    def join(cls, parts: "Sequence[SamplingMask]") -> "SamplingMask":
        """The masks of tokens one after another."""
        return cls(
            tokens=np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)]),
            offsets=offsets_of(np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in parts)])),
        )

    def slice(self, start: int, end: int) -> "SamplingMask":
        """The rows of the tokens from one to another, a view."""
        first, last = int(self.offsets[start]), int(self.offsets[end])
        return SamplingMask(tokens=self.tokens[first:last], offsets=self.offsets[start : end + 1] - first)

    def take(self, offsets: Int64Array, indices: Int64Array) -> "SamplingMask":
        """The rows of the sequences `indices` int64 [M], where sequence n has the tokens offsets[n] to offsets[n+1]."""
        return SamplingMask(
            tokens=take_rows(self.tokens, self.offsets[offsets], indices),
            offsets=offsets_of(take_rows(self.lengths, offsets, indices)),
        )

    def check_length(self, num_tokens: int) -> None:
        """ContractError unless it is of so many tokens."""
        if len(self) != num_tokens:
            raise ContractError(f"sampling_mask: found rows for {len(self)} tokens; expected {num_tokens}")

    def check(self, tokens: Int32Array) -> None:
        """ContractError unless these `tokens` int32 [T] are each in its own row, where that has any."""
        lengths = self.lengths
        rows = np.repeat(np.arange(len(tokens)), lengths)
        has_token = np.bincount(rows[self.tokens == tokens[rows]], minlength=len(tokens))
        wrong = (lengths > 0) & (has_token != 1)
        if wrong.any():
            first = int(wrong.argmax())
            found = f"{has_token[first]} times the token {tokens[first]} itself among {lengths[first]} at token {first}"
            raise ContractError(f"sampling_mask: found {found}; expected it once")


Images: TypeAlias = tuple[tuple[bytes, ...], ...]
"""For each sequence its images in order, each an encoded file. Its tokens hold as many placeholders for each as the model's
image processor says, in the same order. Placeholders behind these, which a policy may say, stand for none. A file is a
hundredth of the numbers that a model makes of it, and exact: whoever decodes it gets the same pixels. The samples of a prompt
hold one object, which pickle writes once."""


def check_images(images: object, num_sequences: int) -> None:
    """ContractError unless there is a tuple of encoded files for each sequence."""
    if not isinstance(images, tuple) or len(images) != num_sequences:
        found = f"{len(images)} entries" if isinstance(images, tuple) else type(images).__name__
        raise ContractError(f"images: found {found}; expected a tuple of {num_sequences}, one of each sequence")
    for number, files in enumerate(images):
        if not isinstance(files, tuple) or not all(isinstance(file, bytes) for file in files):
            raise ContractError(f"images: found {type(files).__name__} for sequence {number}; expected a tuple of bytes")


GENERATION_LOGPROBS = "generation_logprobs"
"""float32 [T]: log-probability under the distribution sampled from; 0.0 where loss_mask is False."""
PREVIOUS_LOGPROBS = "previous_logprobs"
"""float32 [T]: the trainer's log-probability at the start of the step. Only where LossSpec.previous_logprobs is "given"."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""float32 [T]: log-probability under the frozen reference; 0.0 where loss_mask is False."""
ADVANTAGES = "advantages"
"""float32 [T]: advantage of the token; 0.0 where loss_mask is False."""
VALUES = "values"
"""float32 [T]: the return that the critic predicts after each token, at the step's first weights, whatever loss_mask says. The
value of the state in which token t was chosen is that of the token before it."""
WEIGHT_VERSIONS = "weight_versions"
"""int32 [T]: version of the weights that sampled the token; -1 where the token was not generated."""
ROUTED_EXPERTS = "routed_experts"
"""int16 [T, L, K]: the K experts to which the generator sent each token, in each of the L layers of a mixture of experts. It is
-1 in layers without experts, and where no generator routed the token: the trainer then chooses itself."""

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
    """Per-token columns, [T] or [T, ...] each, float32, int32, int16 or bool; float64 where the trainer computes in it."""
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
        expected = "float32/float64/int32/int16/bool"
        for name, column in self.token_columns.items():
            if column.shape[:1] != (self.num_tokens,) or str(column.dtype) not in expected.split("/"):
                found = f"shape {list(column.shape)} of {column.dtype}"
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
        return GlobalCounts.of(self.loss_lengths, self.sequence_columns.get(EPISODE_IDS))

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
        """Return the batch with read-only views of its arrays."""
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
        """Return the batch with an added or replaced per-token column [T, ...]."""
        return evolve(self, token_columns={**self.token_columns, name: column})


@frozen(kw_only=True)
class GlobalCounts:
    """The divisors of losses: counts over the whole optimizer step, all microbatches and all ranks."""

    num_loss_tokens: int
    """Tokens where loss_mask is True."""
    num_loss_sequences: int
    """Sequences with at least one such token; those of an episode (EPISODE_IDS) count once."""

    @classmethod
    def of(cls, loss_lengths: Int64Array, episodes: AnyArray | None) -> "GlobalCounts":
        """Count N sequences, given the loss tokens of each, int64 [N], and its episode, [N], where one may have several."""
        counted = loss_lengths > 0
        number = np.count_nonzero(counted) if episodes is None else len(np.unique(episodes[counted]))
        return cls(num_loss_tokens=int(loss_lengths.sum()), num_loss_sequences=int(number))

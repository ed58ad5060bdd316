"""The tokens that truncated sampling chose each token among: what top-k and top-p had kept."""

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from rlcore.spi.arrays import Int32Array, Int64Array, check_array, check_offsets, offsets_of, take_rows
from rlcore.spi.errors import ContractError


@frozen(kw_only=True, eq=False)
class SamplingMask:
    """The kept tokens of T tokens, by id: the distribution that each was sampled from is the softmax over these alone ("Keep
    Sampling Mask", arXiv:2512.02556, section 3.1). Ids are exact where a threshold would not be: a trainer's logits differ
    from the generator's by rounding, which moves tokens across it. It takes 8 bytes a token, and 4 for each that was kept."""

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

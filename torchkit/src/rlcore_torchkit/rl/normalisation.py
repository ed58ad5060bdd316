"""What each token counts in the loss. The weights come from global counts and from whole sequences only, so that the sum over
microbatches depends neither on how they were cut nor on their order."""

from typing import Literal

import torch
from torch import Tensor

from rlcore.spi import GlobalCounts


def token_weights(
    normalisation: Literal["token", "sequence", "constant"],
    *,
    loss_mask: Tensor,
    offsets: Tensor,
    counts: GlobalCounts,
    constant_length: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T] of `dtype`: 0 outside `loss_mask` bool [T], and inside

    - "token": 1 / global tokens (DAPO, arXiv:2503.14476, equation 8);
    - "sequence": 1 / (tokens of its sequence · global sequences) (DeepSeekMath, arXiv:2402.03300, equation 3);
    - "constant": 1 / (`constant_length` · global sequences) (Dr.GRPO, arXiv:2503.20783, section 3.2).
    """
    mask = loss_mask.to(dtype)
    num_sequences = max(counts.num_loss_sequences, 1)
    match normalisation:
        case "token":
            return mask / max(counts.num_loss_tokens, 1)
        case "sequence":
            return mask / (_loss_tokens_of_sequence(loss_mask, offsets) * num_sequences)
        case "constant":
            assert constant_length is not None, "refused by check"
            return mask / (constant_length * num_sequences)


def _loss_tokens_of_sequence(loss_mask: Tensor, offsets: Tensor) -> Tensor:
    """int64 [T]: loss tokens of the sequence that each token belongs to, at least 1."""
    running = torch.nn.functional.pad(loss_mask.long().cumsum(0), (1, 0))
    per_sequence = running[offsets].diff().clamp(min=1)
    return per_sequence.repeat_interleave(offsets.diff(), output_size=len(loss_mask))

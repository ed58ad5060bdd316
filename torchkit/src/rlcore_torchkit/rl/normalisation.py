"""What each token counts in the loss. The weights come from global counts and from whole sequences only, so that the sum over
microbatches depends neither on how they were cut nor on their order."""

from typing import Literal

import torch
from torch import Tensor

from rlcore.spi import GlobalCounts
from rlcore_torchkit.rl.sequences import Sequences


def token_weights(
    normalisation: Literal["token", "sequence", "constant"],
    *,
    sequences: Sequences,
    counts: GlobalCounts,
    constant_length: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T] of `dtype`: 0 outside the loss mask, and inside

    - "token": 1 / global tokens (DAPO, arXiv:2503.14476, equation 8);
    - "sequence": 1 / (tokens of its sequence · global sequences) (DeepSeekMath, arXiv:2402.03300, equation 3);
    - "constant": 1 / (`constant_length` · global sequences) (Dr.GRPO, arXiv:2503.20783, section 3.2); with a length of 1 and
      the ratio of whole sequences this is LUSPO's (arXiv:2602.05261).
    """
    mask = sequences.loss_mask.to(dtype)
    num_sequences = max(counts.num_loss_sequences, 1)
    match normalisation:
        case "token":
            return mask / max(counts.num_loss_tokens, 1)
        case "sequence":
            num_tokens = sequences.spread(sequences.num_tokens.clamp(min=1))
            return mask / (num_tokens * num_sequences)
        case "constant":
            assert constant_length is not None, "refused by check"
            return mask / (constant_length * num_sequences)

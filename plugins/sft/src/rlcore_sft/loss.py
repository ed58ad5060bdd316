"""The negative log-likelihood, run inside every trainer."""

import math

import torch

from rlcore.spi import LossInputs, LossOutput
from rlcore_sft.config import SftConfig


def sft_loss(inputs: LossInputs, config: SftConfig) -> LossOutput:
    """-Σ logprobs over the loss tokens, divided by the optimizer step's number of them; nats per token.

    Metrics: `token_accuracy_bound`, the share of tokens of probability above one half, each certainly the most probable
    one, so a lower bound of the token accuracy; `token_loss_max`, the worst token's loss.
    """
    del config
    num_tokens = max(inputs.counts.num_loss_tokens, 1)
    losses = -torch.where(inputs.loss_mask, inputs.logprobs, 0.0)
    likely = inputs.loss_mask & (losses.detach() < math.log(2))
    return LossOutput(
        loss=losses.sum() / num_tokens,
        sums={"token_accuracy_bound": likely.sum() / num_tokens},
        maxima={"token_loss_max": losses.detach().max()},
    )

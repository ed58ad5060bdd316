"""Distance of the generator's log-probabilities from the trainer's, token by token."""

import torch
from torch import Tensor

from rlcore_torchkit.rl.policy_gradient import importance_ratio
from rlcore_torchkit.rl.sequences import MaskedMean

MAX_DIFFERENCE = 50.0
"""The largest difference in nats that is told apart; e⁵⁰ times any number of tokens is finite in float32."""


def mismatch(trainer: Tensor, generation: Tensor, mean: MaskedMean) -> dict[str, Tensor]:
    """MISMATCH_METRICS of the trainer's and the generator's log-probabilities, float32 [T] each, at the same weights.

    Weights with nothing in common are told by a large number and not by an infinite one.
    """
    trainer = trainer.detach()
    delta = (trainer - generation).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    return {
        "token_mult_prob_error": mean(torch.exp(delta.abs())),
        "generation_kl_error": mean(torch.expm1(delta) - delta),
        "importance_ratio": mean(importance_ratio(trainer, generation)),
    }

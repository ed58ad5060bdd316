"""The losses of policy and critic, run inside every trainer."""

import torch

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, VALUES, ContractError, LossInputs, LossOutput
from rlcore_ppo.config import PpoConfig
from rlcore_torchkit.rl.policy_gradient import (
    bound_importance_weight,
    clipped_objective,
    importance_ratio,
    likelihood_loss,
    previous_logprobs,
    token_weights,
)
from rlcore_torchkit.rl.sequences import MaskedMean, Sequences, masked
from rlcore_torchkit.rl.value_loss import clipped_value_loss

RETURNS = "returns"
"""float32 [T], a token column: what was earned from a generated token on, as the critic is to tell it before that token."""


def policy_loss(inputs: LossInputs, config: PpoConfig) -> LossOutput:
    """Σ_t w_t (c_t objective_t - entropy_coefficient entropy_t) over a microbatch's tokens (arXiv:1707.06347, equation 7), and
    likelihood_coefficient times `likelihood_loss`.

    w are `token_weights`, c the truncated ratio of trainer to generator at the start of the step. `config.previous_logprobs` is
    resolved; ContractError where it is "trainer" and `inputs.previous_logprobs` is missing.
    """
    current = masked(inputs.logprobs, inputs)
    generation = masked(inputs.token_columns[GENERATION_LOGPROBS], inputs)
    previous = previous_logprobs(inputs, generation, config.previous_logprobs)
    mean, sequences = MaskedMean(inputs.loss_mask, inputs.counts), Sequences.of(inputs)
    objective = clipped_objective(
        current - previous,
        inputs.token_columns[ADVANTAGES],
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    sums, maxima = objective.means(mean), objective.maxima(inputs.loss_mask)
    per_token = objective.loss
    if config.previous_logprobs == "trainer" and config.importance_correction == "token":
        ratio = importance_ratio(previous, generation)
        weight = bound_importance_weight(ratio, "truncate", minimum=0.0, maximum=config.importance_maximum)
        sums |= {"importance_weight": mean(weight), "importance_truncated": mean(ratio > config.importance_maximum)}
        per_token = per_token * weight
    assert inputs.entropy is not None, "asked for by Ppo"
    sums["entropy"] = mean(inputs.entropy)
    if config.entropy_coefficient:
        per_token = per_token - config.entropy_coefficient * masked(inputs.entropy, inputs)
    weights = token_weights(
        config.loss_normalisation, sequences=sequences, counts=inputs.counts, constant_length=None, dtype=current.dtype
    )
    loss = (per_token * weights).sum()
    if config.likelihood_coefficient:
        likelihood = likelihood_loss(current, inputs)
        loss = loss + config.likelihood_coefficient * likelihood
        sums["positive_nll"] = likelihood.detach()
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def critic_loss(inputs: LossInputs, config: PpoConfig) -> LossOutput:
    """Mean over the step's tokens of ½ max((V - R)², (clamp(V, V_old ± value_clip) - R)²); V is the value before the token.

    ContractError where the trainer gives no values.
    """
    if inputs.values is None:
        raise ContractError('critic_loss: found no values; expected those of a trainer with the head "value"')
    # `values` tell what comes after a token: the state in which token t was chosen is the one after token t - 1. No sequence
    # begins with a loss token, so what is rolled over a sequence's beginning is never read.
    values, previous = (masked(held.roll(1), inputs) for held in (inputs.values, inputs.token_columns[VALUES]))
    found = clipped_value_loss(values, previous, masked(inputs.token_columns[RETURNS], inputs), clip=config.value_clip)
    mean = MaskedMean(inputs.loss_mask, inputs.counts)
    loss = torch.where(inputs.loss_mask, found.loss, 0.0).sum() / max(inputs.counts.num_loss_tokens, 1)
    return LossOutput(loss=loss, sums={"clip_fraction": mean(found.clipped)})

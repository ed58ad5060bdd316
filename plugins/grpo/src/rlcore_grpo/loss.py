"""The GRPO loss, run inside every trainer."""

import torch
from torch import Tensor

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, REFERENCE_LOGPROBS, ContractError, LossInputs, LossOutput
from rlcore_grpo.loss_config import LossConfig
from rlcore_torchkit.rl.clipping import clipped_objective
from rlcore_torchkit.rl.correction import importance_ratio, truncate
from rlcore_torchkit.rl.kl import kl_penalty
from rlcore_torchkit.rl.metrics import MaskedMean, objective_maxima, objective_means
from rlcore_torchkit.rl.normalisation import token_weights


def grpo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Σ_t w_t (c_t objective_t + kl_coefficient kl_t - entropy_coefficient entropy_t) over a microbatch's tokens.

    w are the weights of `rlcore_torchkit.rl.normalisation`, c those of `rlcore_torchkit.rl.correction`.
    `config.previous_logprobs` is resolved: "generation" or "trainer"; ContractError where it is the latter and the trainer does
    not give `inputs.previous_logprobs`.
    """
    current = _masked(inputs.logprobs, inputs)
    generation = _masked(inputs.token_columns[GENERATION_LOGPROBS], inputs)
    if config.previous_logprobs == "generation":
        previous = generation
    elif inputs.previous_logprobs is not None:
        previous = _masked(inputs.previous_logprobs, inputs)
    else:
        raise ContractError(
            "found no previous_logprobs in the loss's inputs; expected those that LossSpec.previous_logprobs declares. "
            'Pass on what LossSpec.previous_of returns, or set algorithm.grpo.previous_logprobs to "generation"'
        )
    weights = token_weights(
        config.loss_normalisation,
        loss_mask=inputs.loss_mask,
        offsets=inputs.offsets,
        counts=inputs.counts,
        constant_length=config.constant_length,
        dtype=current.dtype,
    )
    objective = clipped_objective(
        current,
        previous,
        inputs.token_columns[ADVANTAGES],
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    mean = MaskedMean(inputs.loss_mask, inputs.counts)
    sums = objective_means(objective, mean)
    per_token = objective.loss
    if config.importance_correction == "token" and config.previous_logprobs != "generation":
        ratio = importance_ratio(previous, generation)
        per_token = per_token * truncate(ratio, maximum=config.importance_maximum)
        sums["importance_truncated"] = mean(ratio > config.importance_maximum)
    if config.kl_coefficient:
        reference = _masked(inputs.token_columns[REFERENCE_LOGPROBS], inputs)
        kl = kl_penalty(current, reference, estimator=config.kl_estimator, gradient=config.kl_gradient)
        per_token = per_token + config.kl_coefficient * kl
        sums["kl"] = mean(kl)
    if inputs.entropy is None:
        sums["approx_entropy"] = -mean(importance_ratio(current, generation) * current)
    else:
        sums["entropy"] = mean(inputs.entropy)
        if config.entropy_coefficient:
            per_token = per_token - config.entropy_coefficient * _masked(inputs.entropy, inputs)
    return LossOutput(loss=(per_token * weights).sum(), sums=sums, maxima=objective_maxima(objective, inputs.loss_mask))


def _masked(values: Tensor, inputs: LossInputs) -> Tensor:
    """`values` [T] with 0 outside the mask, so that nothing there, not even a NaN, reaches value or gradient."""
    return torch.where(inputs.loss_mask, values, 0.0)

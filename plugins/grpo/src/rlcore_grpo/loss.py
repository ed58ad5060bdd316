"""The GRPO loss, run inside every trainer."""

from torch import Tensor

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, REFERENCE_LOGPROBS, LossInputs, LossOutput
from rlcore_grpo.entropy_tokens import HIGH_COVARIANCE
from rlcore_grpo.importance import Importance, importance_of
from rlcore_grpo.loss_config import LossConfig
from rlcore_torchkit.rl.clipping import (
    ClipRange,
    clipped_objective,
    clipped_weight_objective,
    geometric_mean_objective,
    penalised_objective,
    without,
)
from rlcore_torchkit.rl.correction import importance_ratio
from rlcore_torchkit.rl.inputs import masked, previous_logprobs
from rlcore_torchkit.rl.kl import kl_penalty
from rlcore_torchkit.rl.metrics import MaskedMean, objective_maxima, objective_means
from rlcore_torchkit.rl.normalisation import token_weights
from rlcore_torchkit.rl.objective import Objective, policy_gradient
from rlcore_torchkit.rl.ratio import log_ratio
from rlcore_torchkit.rl.sequences import Sequences
from rlcore_torchkit.rl.soft import gated_objective, kernel_objective


def grpo_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Σ_t w_t (c_t objective_t + kl_coefficient kl_t - entropy_coefficient entropy_t) over a microbatch's tokens.

    w are the weights of `rlcore_torchkit.rl.normalisation`, c those of `rlcore_grpo.importance`.
    `config.previous_logprobs` is resolved: "generation" or "trainer"; ContractError where it is the latter and the trainer does
    not give `inputs.previous_logprobs`.
    """
    current = masked(inputs.logprobs, inputs)
    generation = masked(inputs.token_columns[GENERATION_LOGPROBS], inputs)
    previous = previous_logprobs(inputs, generation, config.previous_logprobs)
    sequences = Sequences(inputs.loss_mask, inputs.offsets)
    mean = MaskedMean(inputs.loss_mask, inputs.counts)
    weights = token_weights(
        config.loss_normalisation,
        sequences=sequences,
        counts=inputs.counts,
        constant_length=config.constant_length,
        dtype=current.dtype,
    )
    importance = importance_of(inputs, config, current=current, previous=previous, generation=generation, sequences=sequences)
    ratio = log_ratio(config.ratio, current, previous, sequences)
    objective = _objective(inputs, config, current=current, log_ratio=ratio, importance=importance, sequences=sequences)
    per_token = importance.applied_to(objective.loss, is_weighed=config.objective == "vespo")
    sums = {**objective_means(objective, mean), **importance.sums}
    if config.kl_coefficient:
        reference = masked(inputs.token_columns[REFERENCE_LOGPROBS], inputs)
        sampled_by = {"none": None, "previous": previous, "generation": generation}[config.kl_importance]
        kl = kl_penalty(current, reference, estimator=config.kl_estimator, gradient=config.kl_gradient, sampled_by=sampled_by)
        per_token = per_token + config.kl_coefficient * kl
        sums["kl"] = mean(kl)
    if inputs.entropy is None:
        sums["approx_entropy"] = -mean(importance_ratio(current, generation) * current)
    else:
        sums["entropy"] = mean(inputs.entropy)
        if config.entropy_coefficient:
            per_token = per_token - config.entropy_coefficient * masked(inputs.entropy, inputs)
    maxima = {**objective_maxima(objective, inputs.loss_mask), **importance.maxima}
    return LossOutput(loss=(per_token * weights).sum(), sums=sums, maxima=maxima)


def _objective(
    inputs: LossInputs,
    config: LossConfig,
    *,
    current: Tensor,
    log_ratio: Tensor,
    importance: Importance,
    sequences: Sequences,
) -> Objective:
    """What `config.objective` names, of log-probabilities and log-ratios float32 [T], 0 outside the mask."""
    advantages = inputs.token_columns[ADVANTAGES]
    bounds: ClipRange = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    match config.objective:
        case "clipped":
            return clipped_objective(log_ratio, advantages, **bounds, dual_clip=config.dual_clip)
        case "clip_cov":
            clipped = clipped_objective(log_ratio, advantages, **bounds, dual_clip=None)
            return without(clipped, inputs.token_columns[HIGH_COVARIANCE] > 0)
        case "kl_cov":
            chosen = inputs.token_columns[HIGH_COVARIANCE] > 0
            return penalised_objective(log_ratio, advantages, chosen, coefficient=config.covariance_penalty)
        case "cispo":
            return clipped_weight_objective(current, log_ratio, advantages, **bounds)
        case "sapo":
            return gated_objective(
                log_ratio,
                advantages,
                positive=config.sapo_temperature_positive,
                negative=config.sapo_temperature_negative,
            )
        case "gmpo":
            return geometric_mean_objective(log_ratio, advantages, sequences, **bounds)
        case "vespo":
            return kernel_objective(
                current,
                log_ratio,
                advantages,
                importance.weight,
                sequences,
                positive=(config.vespo_power_positive, config.vespo_decay_positive),
                negative=(config.vespo_power_negative, config.vespo_decay_negative),
            )
        case "policy_gradient":
            return policy_gradient(current, advantages, log_ratio=log_ratio)

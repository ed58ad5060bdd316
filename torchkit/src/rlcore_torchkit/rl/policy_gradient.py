"""The policy-gradient loss, from log-probabilities to a number, in the order of the papers.

    loss = Σ_t w_t (c_t m_t objective_t + kl_coefficient kl_t - entropy_coefficient entropy_t) + likelihood_coefficient nll

1. ratio: how much likelier the policy has become than it was, of a token or of its sequence;
2. objective: what the ratio and the advantage A of a token make of it, with hard bounds, soft weights or none;
3. KL divergence from a reference policy;
4. correction: weight c and mask m for what separates the generator from the policy that is trained;
5. normalisation: what each token counts, w;
6. loss: the sum, and its metrics.

Tensors are float32 [T], one entry a token, where nothing else is said; flags are bool [T]. `current` are the policy's
log-probabilities, `previous` the trainer's at the start of the step, `generation` the generator's; all are 0 outside the loss
mask. `LossConfig` has the options.
"""

import math
from collections.abc import Mapping
from typing import TypedDict

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from rlcore.spi import (
    ADVANTAGES,
    GENERATION_LOGPROBS,
    REFERENCE_LOGPROBS,
    ContractError,
    GlobalCounts,
    LossInputs,
    LossOutput,
)
from rlcore_torchkit.rl.covariance import HIGH_COVARIANCE
from rlcore_torchkit.rl.loss_config import ImportanceBound, KlEstimator, KlGradient, LossConfig, Normalisation, RatioLevel
from rlcore_torchkit.rl.sequences import MaskedMean, Sequences, masked
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS

MAX_LOG_RATIO = 20.0
"""exp of it is finite in float32 and far outside any clip range: beyond it the ratio has no gradient, instead of a NaN."""
MAX_KL = 10.0
MIN_LOG_WEIGHT = -18.420680743952367
"""log 1e-8: less than that a sequence, or a token of it, never weighs in VESPO's kernel."""
MAX_SEQUENCE_LOG_RATIO = 50.0
"""exp of it, times any number of tokens, is finite in float32 and above any bound that means something."""

# 1. Ratio


def previous_logprobs(inputs: LossInputs, generation: Tensor, choice: str) -> Tensor:
    """The log-probabilities that the policy's are compared with: with `choice` "generation" those given, with "trainer" the
    trainer's own at the start of the step. ContractError where these are missing."""
    if choice == "generation":
        return generation
    if inputs.previous_logprobs is None:
        raise ContractError(
            "found no previous_logprobs in the loss's inputs; expected those that LossSpec.previous_logprobs declares. "
            'Pass on what LossSpec.previous_of returns, or set the algorithm\'s previous_logprobs to "generation"'
        )
    return masked(inputs.previous_logprobs, inputs)


def log_ratio(level: RatioLevel, current: Tensor, previous: Tensor, sequences: Sequences) -> Tensor:
    """The logarithm of the ratio ρ, differentiable; with δ = current - previous it is

    - "token": δ (PPO, arXiv:1707.06347);
    - "sequence": the mean of δ over the sequence's loss tokens (GSPO, arXiv:2507.18071);
    - "sequence_token": the same value, its gradient that of the token's own log-probability (GSPO-token, the same paper);
    - "sequence_product": the sum of δ, whose exp is the ratio of the whole sequences (RLOO, arXiv:2402.14740).

    A segment of an episode is a sequence of its own here: what the policy said within one context.
    """
    delta = current - previous
    match level:
        case "token":
            return delta
        case "sequence":
            return sequences.spread(sequences.mean(delta))
        case "sequence_token":
            return sequences.spread(sequences.mean(delta)).detach() + (current - current.detach())
        case "sequence_product":
            return sequences.spread(sequences.sum(delta))


def ratio_of(log_ratio: Tensor) -> Tensor:
    """ρ = exp(log_ratio), the exponent within ±20."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


# 2. Objective: with hard bounds of the ratio, with soft weights, or without either


@frozen(kw_only=True, eq=False)
class Objective:
    """The objective of each token, and what metrics say of it."""

    loss: Tensor
    """Differentiable, to be minimised."""
    ratio: Tensor
    """exp(current - previous) of the token or its sequence, detached."""
    figures: Mapping[str, Tensor] = field(factory=dict)
    """Detached values or flags whose means are metrics of these names."""

    def means(self, mean: MaskedMean) -> dict[str, Tensor]:
        """Return the policy's distance from the previous one, and the objective's own figures."""
        return {"ratio_mean": mean(self.ratio), **{name: mean(values) for name, values in self.figures.items()}}

    def maxima(self, loss_mask: Tensor) -> dict[str, Tensor]:
        """The largest ratio; 0 where the microbatch has no loss token."""
        return {"ratio_max": torch.where(loss_mask, self.ratio, 0.0).max()}


class ClipRange(TypedDict):
    """ρ is clipped at 1 - clip_low and 1 + clip_high."""

    clip_low: float
    clip_high: float


def clipped_objective(
    log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Objective:
    """max(-A ρ, -A clamp(ρ, 1 - clip_low, 1 + clip_high)).

    PPO (arXiv:1707.06347, equation 7) with DAPO's two bounds (arXiv:2503.14476, equation 10) and, where A < 0, the dual
    clip min(·, -A c) (arXiv:1912.09729, equation 5).
    """
    ratio = ratio_of(log_ratio)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    negative = advantages < 0
    dual_clipped = torch.zeros_like(negative)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        dual_clipped = negative & (loss.detach() > bound)
        loss = torch.where(dual_clipped, bound, loss)
    ratio = ratio.detach()
    figures = _clipped(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return Objective(loss=loss, ratio=ratio, figures={**figures, "dual_clip_fraction": dual_clipped})


def drop_tokens(objective: Objective, chosen: Tensor) -> Objective:
    """Drop the tokens of `chosen` bool [T] from the objective: they get no gradient (Clip-Cov, arXiv:2505.22617)."""
    figures = {**objective.figures, "high_covariance": chosen}
    return evolve(objective, loss=objective.loss * ~chosen, figures=figures)


def penalised_objective(log_ratio: Tensor, advantages: Tensor, chosen: Tensor, *, coefficient: float) -> Objective:
    """-A ρ, plus coefficient · |log ρ| at the tokens of `chosen` bool [T]; no bound of the ratio.

    KL-Cov (arXiv:2505.22617), with the estimate of the divergence that its authors' code takes.
    """
    ratio = ratio_of(log_ratio)
    penalty = coefficient * log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
    loss = -advantages * ratio + torch.where(chosen, penalty, 0.0)
    return Objective(loss=loss, ratio=ratio.detach(), figures={"high_covariance": chosen})


def clipped_weight_objective(
    current: Tensor, log_ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Objective:
    """-A stopgrad(clamp(ρ, 1 - clip_low, 1 + clip_high)) current.

    CISPO (MiniMax-M1, arXiv:2506.13585): the bound is one of the weight, so every token has a gradient.
    """
    ratio = ratio_of(log_ratio.detach())
    low, high = ratio < 1.0 - clip_low, ratio > 1.0 + clip_high
    figures = {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}
    return Objective(loss=-advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * current, ratio=ratio, figures=figures)


def geometric_mean_objective(
    log_ratio: Tensor, advantages: Tensor, sequences: Sequences, *, clip_low: float, clip_high: float
) -> Objective:
    """-A exp(mean of the sequence's clipped log ρ), log ρ = `log_ratio` of the tokens.

    GMPO (arXiv:2507.20673): log ρ is clipped at log(1 + clip_high) from above where A > 0, at log(1 - clip_low)
    from below where A < 0, token by token, before the geometric mean is taken.
    """
    log_low = math.log1p(-clip_low) if clip_low < 1 else -math.inf
    within = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    within = torch.where(advantages < 0, within.clamp(min=log_low), within.clamp(max=math.log1p(clip_high)))
    ratio = ratio_of(log_ratio.detach())
    figures = _clipped(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return Objective(loss=-advantages * sequences.spread(sequences.mean(within).exp()), ratio=ratio, figures=figures)


def _clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> dict[str, Tensor]:
    """Mark tokens that a bound of the ratio leaves without a gradient."""
    low, high = (advantages < 0) & (ratio < 1.0 - clip_low), (advantages > 0) & (ratio > 1.0 + clip_high)
    return {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}


def gated_objective(log_ratio: Tensor, advantages: Tensor, *, positive: float, negative: float) -> Objective:
    """-A · 4/τ · sigmoid(τ (ρ - 1)), τ = `positive` where A > 0, else `negative`.

    SAPO (arXiv:2511.20347). The metric `gate_mean` is 4 p (1 - p), p that sigmoid: the share of its
    gradient that a token keeps, 1 where ρ = 1.
    """
    ratio = ratio_of(log_ratio)
    temperature = torch.where(advantages > 0, positive, negative).to(ratio.dtype)
    gate = torch.sigmoid(temperature * (ratio - 1.0))
    kept = gate.detach()
    return Objective(
        loss=-advantages * gate * 4.0 / temperature, ratio=ratio.detach(), figures={"gate_mean": 4.0 * kept * (1.0 - kept)}
    )


def kernel_objective(
    current: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    importance: Tensor | None,
    sequences: Sequences,
    *,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Objective:
    """-A stopgrad(w^k exp(λ (1 - w))) current, (k, λ) = `positive` where A >= 0, else `negative`.

    VESPO (arXiv:2602.10693): w is the importance weight of the whole sequence, the product over its loss tokens of
    exp(log_ratio) and, where it is given, `importance`, the bounded ratio of the previous policy to the generator. The
    logarithm of a factor and of w stays within [log 1e-8, 20]. The kernel is 1 at w = 1 and its mean the metric `kernel_mean`.
    """
    log_weight = sequences.sum(log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    if importance is not None:
        log_weight = log_weight + sequences.sum(importance.log().clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO))
    log_weight = sequences.spread(log_weight.clamp(MIN_LOG_WEIGHT, MAX_LOG_RATIO))
    rising = advantages >= 0
    power = torch.where(rising, positive[0], negative[0])
    decay = torch.where(rising, positive[1], negative[1])
    kernel = torch.exp(power * log_weight + decay * (1.0 - log_weight.exp()))
    return Objective(loss=-advantages * kernel * current, ratio=ratio_of(log_ratio.detach()), figures={"kernel_mean": kernel})


def policy_gradient(current: Tensor, advantages: Tensor, *, log_ratio: Tensor) -> Objective:
    """-A current (REINFORCE, Williams, 1992): no ratio and no bound; `log_ratio` is a metric alone."""
    return Objective(loss=-advantages * current, ratio=ratio_of(log_ratio.detach()))


# 3. KL divergence


def kl_estimate(delta: Tensor, estimator: KlEstimator) -> Tensor:
    """k1 = -Δ, k2 = Δ²/2 or k3 = e^Δ - 1 - Δ, Δ = reference - current (Schulman, "Approximating KL Divergence").

    Δ is clamped to ±20 and the estimate to ±10.
    """
    delta = delta.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            estimate = -delta
        case "k2":
            estimate = delta.square() / 2
        case "k3":
            estimate = torch.expm1(delta) - delta
    return estimate.clamp(-MAX_KL, MAX_KL)


def kl_penalty(
    current: Tensor,
    reference: Tensor,
    *,
    estimator: KlEstimator,
    gradient: KlGradient,
    log_weight: Tensor | None = None,
    maximum: float | None = None,
) -> Tensor:
    """The estimate of each token's divergence from the reference, differentiable.

    For "expectation" it is multiplied by exp(current - stopgrad(current)), which is 1 and adds k ∇current to the gradient: that
    of E[k] where the tokens are drawn from the policy. It comes after the clamp, so that the tokens farthest from the
    reference are still pulled back.

    Where they are drawn from another policy, `log_weight` is the logarithm of the ratio to it, and the estimate is weighed by
    exp(log_weight), the exponent within ±20 (DeepSeek-V3.2, arXiv:2512.02556, "Unbiased KL Estimate"): differentiated for
    "expectation", a constant for "estimate". The weighed estimate stays within ±maximum, beyond which it has no gradient.
    """
    kl = kl_estimate(reference - current, estimator)
    weight = ratio_of(current - current.detach() if log_weight is None else log_weight)
    kl = kl * (weight if gradient == "expectation" else weight.detach())
    return kl if maximum is None else kl.clamp(-maximum, maximum)


# 4. Correction: weights and masks for the difference between generator and trainer; none of them has a gradient


def importance_ratio(previous: Tensor, generation: Tensor) -> Tensor:
    """exp(previous - generation); 0 where that is not finite."""
    return torch.exp(previous - generation).detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def sequence_importance_ratio(previous: Tensor, generation: Tensor, sequences: Sequences) -> Tensor:
    """exp(Σ (previous - generation)) over the loss tokens of each token's sequence, the sum at most 50."""
    total = sequences.sum((previous - generation).detach()).clamp(max=MAX_SEQUENCE_LOG_RATIO)
    return sequences.spread(total.exp().nan_to_num(nan=0.0))


def bound_importance_weight(ratio: Tensor, bound: ImportanceBound, *, minimum: float, maximum: float) -> Tensor:
    """Return the ratio itself within [minimum, maximum]; outside it

    - "truncate": the nearest bound (truncated importance sampling: Ionides 2008, "Truncated Importance Sampling");
    - "mask": 0 (IcePop, in Ring-1T's report, arXiv:2510.18855).
    """
    if bound == "truncate":
        return ratio.clamp(minimum, maximum)
    return torch.where((ratio >= minimum) & (ratio <= maximum), ratio, 0.0)


def within_geometric_mean(
    previous: Tensor, generation: Tensor, sequences: Sequences, *, minimum: float, maximum: float
) -> Tensor:
    """bool [T]: whether exp(mean of previous - generation) over the sequence's loss tokens is within the bounds."""
    ratio = sequences.mean((previous - generation).detach()).exp()
    return sequences.spread((ratio >= minimum) & (ratio <= maximum))


def off_policy_mask(current: Tensor, generation: Tensor, advantages: Tensor, sequences: Sequences, *, maximum: float) -> Tensor:
    """bool [T]: False where A < 0 and the mean of generation - current over the sequence's loss tokens, in nats, is above
    `maximum` (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556, equation 9)."""
    divergence = sequences.spread(sequences.mean(generation - current.detach()))
    return (advantages >= 0) | (divergence <= maximum)


def sequence_mismatch(trainer: Tensor, generation: Tensor, sequences: Sequences, counts: GlobalCounts) -> dict[str, Tensor]:
    """`sequence_log_ratio`: the mean over sequences of |Σ (trainer - generation)| over a sequence's loss tokens, in nats; of an
    episode in several sequences their sum counts as one."""
    total = sequences.sum((trainer - generation).detach())
    return {"sequence_log_ratio": total.abs().sum() / max(counts.num_loss_sequences, 1)}


def sequence_maxima(trainer: Tensor, generation: Tensor, sequences: Sequences) -> dict[str, Tensor]:
    """The extremes over sequences of exp(mean of trainer - generation), the exponent within ±50: the greatest, and of the
    least its inverse; 0 where the microbatch has no loss token."""
    mean = sequences.mean((trainer - generation).detach()).clamp(-MAX_SEQUENCE_LOG_RATIO, MAX_SEQUENCE_LOG_RATIO)
    there = sequences.num_tokens > 0
    return {
        "sequence_ratio_max": torch.where(there, mean.exp(), 0.0).max(),
        "sequence_inverse_ratio_max": torch.where(there, (-mean).exp(), 0.0).max(),
    }


@frozen(kw_only=True, eq=False)
class Correction:
    """Weights of tokens in the objective, and a mask of those that it leaves out."""

    weight: Tensor | None
    """The bounded ratio of the trainer to the generator; None where each is 1."""
    kept: Tensor | None
    """bool [T]: whether a token is part of the objective; None where all are."""
    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]

    def applied_to(self, loss: Tensor, *, is_weighed: bool) -> Tensor:
        """The objective's `loss` with weight and mask; a NaN stays one. `is_weighed`: the weight is in it already."""
        if self.weight is not None and not is_weighed:
            loss = loss * self.weight
        return loss if self.kept is None else loss * self.kept


def correction_of(
    inputs: LossInputs, config: LossConfig, *, current: Tensor, previous: Tensor, generation: Tensor, sequences: Sequences
) -> Correction:
    """Weight and mask that the options name."""
    mean = MaskedMean(inputs.loss_mask, inputs.counts)
    weight: Tensor | None = None
    sums: dict[str, Tensor] = {}
    maxima: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    if config.previous_logprobs != "generation":
        if config.importance_correction != "none":
            if config.importance_correction == "sequence":
                ratio = sequence_importance_ratio(previous, generation, sequences)
            else:
                ratio = importance_ratio(previous, generation)
            low, high = config.importance_minimum, config.importance_maximum
            weight = bound_importance_weight(ratio, config.importance_bound, minimum=low, maximum=high)
            outside = (ratio < low) | (ratio > high)
            sums["importance_truncated" if config.importance_bound == "truncate" else "importance_masked"] = mean(outside)
            sums["importance_weight"] = mean(weight)
            maxima["importance_weight_max"] = torch.where(inputs.loss_mask, ratio, 0.0).max()
        if config.masks_by_geometric_mean:
            kept["geometric_masked"] = within_geometric_mean(
                previous, generation, sequences, minimum=config.geometric_minimum, maximum=config.geometric_maximum
            )
        sums.update(sequence_mismatch(previous, generation, sequences, inputs.counts))
        maxima.update(sequence_maxima(previous, generation, sequences))
    if config.off_policy_maximum is not None:
        kept["off_policy_masked"] = off_policy_mask(
            current, generation, inputs.token_columns[ADVANTAGES], sequences, maximum=config.off_policy_maximum
        )
    if config.entropy_minimum is not None:
        assert inputs.entropy is not None, "refused by check"
        # The forking tokens of arXiv:2506.01939: the others have no say in the objective.
        kept["low_entropy_masked"] = inputs.entropy.detach() >= config.entropy_minimum
    sums.update({name: mean(~tokens) for name, tokens in kept.items()})
    return Correction(weight=weight, kept=torch.stack([*kept.values()]).all(0) if kept else None, sums=sums, maxima=maxima)


# 5. Normalisation


def token_weights(
    normalisation: Normalisation,
    *,
    sequences: Sequences,
    counts: GlobalCounts,
    constant_length: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """[T] of `dtype`: 0 outside the loss mask, and inside

    - "token": 1 / global tokens (DAPO, arXiv:2503.14476, equation 8);
    - "sequence": 1 / (tokens of its episode · global episodes) (DeepSeekMath, arXiv:2402.03300, equation 3);
    - "constant": 1 / (`constant_length` · global episodes) (Dr.GRPO, arXiv:2503.20783, section 3.2); with a length of 1 and
      the ratio of whole sequences this is LUSPO's (arXiv:2602.05261).

    An episode is a sequence, or several where `sequences.episode_tokens` says how many tokens they have together.
    The weights come from global counts and from whole episodes, so that the sum over microbatches depends neither on how they
    were cut nor on their order.
    """
    mask = sequences.loss_mask.to(dtype)
    num_sequences = max(counts.num_loss_sequences, 1)
    match normalisation:
        case "token":
            return mask / max(counts.num_loss_tokens, 1)
        case "sequence":
            num_tokens = sequences.num_tokens if sequences.episode_tokens is None else sequences.episode_tokens
            return mask / (sequences.spread(num_tokens.clamp(min=1)) * num_sequences)
        case "constant":
            assert constant_length is not None, "refused by check"
            return mask / (constant_length * num_sequences)


# 6. Loss


def policy_gradient_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Σ_t w_t (c_t m_t objective_t + kl_coefficient kl_t - entropy_coefficient entropy_t) over a microbatch's tokens, and
    likelihood_coefficient times `likelihood_loss`.

    `config.previous_logprobs` is resolved: "generation" or "trainer"; ContractError where it is the latter and the trainer does
    not give `inputs.previous_logprobs`.
    """
    current = masked(inputs.logprobs, inputs)
    generation = masked(inputs.token_columns[GENERATION_LOGPROBS], inputs)
    previous = previous_logprobs(inputs, generation, config.previous_logprobs)
    sequences = Sequences.of(inputs)
    mean = MaskedMean(inputs.loss_mask, inputs.counts)

    correction = correction_of(inputs, config, current=current, previous=previous, generation=generation, sequences=sequences)
    ratio = log_ratio(config.ratio, current, previous, sequences)
    objective = _objective(inputs, config, current=current, log_ratio=ratio, importance=correction.weight, sequences=sequences)
    per_token = correction.applied_to(objective.loss, is_weighed=config.objective == "vespo")
    sums = {**objective.means(mean), **correction.sums}
    if config.kl_coefficient:
        reference = masked(inputs.token_columns[REFERENCE_LOGPROBS], inputs)
        log_weights = {"none": None, "previous": current - previous, "generation": current - generation, "ratio": ratio}
        kl = kl_penalty(
            current,
            reference,
            estimator=config.kl_estimator,
            gradient=config.kl_gradient,
            log_weight=log_weights[config.kl_importance],
            maximum=config.kl_maximum,
        )
        per_token = per_token + config.kl_coefficient * kl
        sums["kl"] = mean(kl)
    if inputs.entropy is None:
        sums["approx_entropy"] = -mean(importance_ratio(current, generation) * current)
    else:
        sums["entropy"] = mean(inputs.entropy)
        if config.entropy_coefficient:
            per_token = per_token - config.entropy_coefficient * masked(inputs.entropy, inputs)
    weights = token_weights(
        config.loss_normalisation,
        sequences=sequences,
        counts=inputs.counts,
        constant_length=config.constant_length,
        dtype=current.dtype,
    )
    loss = (per_token * weights).sum()
    if config.likelihood_coefficient:
        likelihood = likelihood_loss(current, inputs)
        loss = loss + config.likelihood_coefficient * likelihood
        sums["positive_nll"] = likelihood.detach()
    maxima = {**objective.maxima(inputs.loss_mask), **correction.maxima}
    return LossOutput(loss=loss, sums=sums, maxima=maxima)


def likelihood_loss(current: Tensor, inputs: LossInputs) -> Tensor:
    """The mean of -current over the tokens of samples with a reward above 0, by the column LIKELIHOOD_WEIGHTS (VAPO,
    arXiv:2504.05118, equation 10)."""
    weighed = -current * masked(inputs.token_columns[LIKELIHOOD_WEIGHTS], inputs)
    return weighed.sum() / max(inputs.counts.num_loss_tokens, 1)


def _objective(
    inputs: LossInputs,
    config: LossConfig,
    *,
    current: Tensor,
    log_ratio: Tensor,
    importance: Tensor | None,
    sequences: Sequences,
) -> Objective:
    """The objective that `config.objective` names."""
    advantages = inputs.token_columns[ADVANTAGES]
    bounds: ClipRange = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    match config.objective:
        case "clipped":
            return clipped_objective(log_ratio, advantages, **bounds, dual_clip=config.dual_clip)
        case "clip_cov":
            clipped = clipped_objective(log_ratio, advantages, **bounds, dual_clip=None)
            return drop_tokens(clipped, inputs.token_columns[HIGH_COVARIANCE] > 0)
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
                importance,
                sequences,
                positive=(config.vespo_power_positive, config.vespo_decay_positive),
                negative=(config.vespo_power_negative, config.vespo_decay_negative),
            )
        case "policy_gradient":
            return policy_gradient(current, advantages, log_ratio=log_ratio)

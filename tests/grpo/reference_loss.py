"""The objective of every option as a loss, in float64 numpy, sequence by sequence, written from the papers' formulas."""

import itertools
from dataclasses import dataclass

import numpy as np

from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS, TokenBatch
from rlcore_grpo.config import GrpoConfig
from rlcore_torchkit.rl.covariance import HIGH_COVARIANCE
from rlcore_torchkit.rl.shaping import LIKELIHOOD_WEIGHTS


@dataclass
class Reference:
    """The loss of a whole batch as a function of the log-probabilities and the entropy, float64 [T] each.

    GRPO: DeepSeekMath (arXiv:2402.03300, equations 3 and 4) with DAPO's bounds and token mean (arXiv:2503.14476, equations 8
    and 10), the dual clip (arXiv:1912.09729, equation 5) and Dr.GRPO's constant length (arXiv:2503.20783, section 3.2). The
    others are named where they stand. `frozen` are the log-probabilities where a formula stops the gradient.
    """

    batch: TokenBatch
    config: GrpoConfig
    frozen: np.ndarray

    def __call__(self, current, entropy):
        mask = self.batch.loss_mask
        pieces = [np.flatnonzero(mask[a:b]) + a for a, b in itertools.pairwise(self.batch.offsets)]
        pieces = [piece for piece in pieces if len(piece)]
        total = 0.0
        for piece in pieces:
            values = self.sequence(current[piece], entropy[piece], piece)
            match self.config.loss_normalisation:
                case "token":
                    total += sum(values) / mask.sum()
                case "sequence":
                    total += np.mean(values) / len(pieces)
                case "constant":
                    total += sum(values) / self.config.constant_length / len(pieces)
        if self.config.likelihood_coefficient:  # VAPO, arXiv:2504.05118, equation 10
            weights = np.float64(self.batch.token_columns[LIKELIHOOD_WEIGHTS])
            total -= self.config.likelihood_coefficient * (weights * current)[mask].sum() / mask.sum()
        return total

    def sequence(self, current, entropy, piece):
        """The losses of one sequence's loss tokens, in order."""
        config, frozen = self.config, self.frozen[piece]
        columns = {name: column[piece].astype(np.float64) for name, column in self.batch.token_columns.items()}
        advantages, generation = columns[ADVANTAGES], columns[GENERATION_LOGPROBS]
        previous = generation if config.previous_logprobs == "generation" else columns.get(PREVIOUS_LOGPROBS, frozen)
        weights = importance(config, previous - generation)
        gains = gain(config, columns, current, frozen, previous, weights)
        if config.objective != "vespo":
            gains = gains * weights
        losses = -gains * kept(config, previous - generation, generation - frozen, advantages, entropy)
        if config.kl_coefficient:
            losses = losses + config.kl_coefficient * divergence(
                config, columns[REFERENCE_LOGPROBS], current, frozen, previous, generation
            )
        return losses - config.entropy_coefficient * entropy


def importance(config, delta):
    """The weight of trainer over generator, of each token: min or 0 outside the bounds (Ionides, 2008; arXiv:2510.18855)."""
    if config.previous_logprobs == "generation" or config.importance_correction == "none":
        return np.ones_like(delta)
    ratio = np.exp(delta if config.importance_correction == "token" else np.full_like(delta, delta.sum()))
    low, high = config.importance_minimum, config.importance_maximum
    if config.importance_bound == "mask":
        return np.array([value if low <= value <= high else 0.0 for value in ratio])
    return np.array([min(max(value, low), high) for value in ratio])


def kept(config, delta, drift, advantages, entropy):
    """1 for the tokens that the objective keeps, else 0: by the geometric mean of a sequence's ratios, DeepSeek-V3.2's M
    (arXiv:2512.02556, equation 9), and the entropy (arXiv:2506.01939)."""
    result = np.ones_like(delta)
    if config.previous_logprobs != "generation":
        result *= config.geometric_minimum <= np.exp(delta.mean()) <= config.geometric_maximum
    if config.off_policy_maximum is not None and drift.mean() > config.off_policy_maximum:
        result[advantages < 0] = 0
    if config.entropy_minimum is not None:
        result[entropy < config.entropy_minimum] = 0
    return result


def gain(config, columns, current, frozen, previous, weights):
    """What each token adds to the objective, to be maximised."""
    advantages, chosen = columns[ADVANTAGES], columns[HIGH_COVARIANCE]
    low, high = 1 - config.clip_low, 1 + config.clip_high
    logs = current - previous
    match config.ratio:
        case "token":
            ratio, constant = np.exp(logs), np.exp(frozen - previous)
        case "sequence":  # GSPO, arXiv:2507.18071: (π/π_old of the whole)^(1/length)
            ratio, constant = (np.full_like(logs, np.exp(np.mean(of))) for of in (logs, frozen - previous))
        case "sequence_token":  # GSPO-token: stopgrad(that) · π_t / stopgrad(π_t)
            constant = np.full_like(logs, np.exp(np.mean(frozen - previous)))
            ratio = constant * np.exp(current - frozen)
        case "sequence_product":  # RLOO, arXiv:2402.14740: π/π_old of the whole
            ratio, constant = (np.full_like(logs, np.exp(np.sum(of))) for of in (logs, frozen - previous))
    match config.objective:
        case "clipped":
            gains = np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages)
            if config.dual_clip:
                gains = np.where(advantages < 0, np.maximum(gains, config.dual_clip * advantages), gains)
            return gains
        case "clip_cov":  # arXiv:2505.22617: 0 at the chosen tokens
            return np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages) * (1 - chosen)
        case "kl_cov":  # arXiv:2505.22617: ρ A, less β |log ρ| at the chosen tokens
            return ratio * advantages - config.covariance_penalty * np.abs(logs) * chosen
        case "cispo":  # arXiv:2506.13585: stopgrad(clip(ρ)) A log π
            return np.clip(constant, low, high) * advantages * current
        case "sapo":  # arXiv:2511.20347: f(ρ) A, f(ρ) = σ(τ (ρ - 1)) 4/τ
            tau = np.where(advantages > 0, config.sapo_temperature_positive, config.sapo_temperature_negative)
            return 4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantages
        case "gmpo":  # arXiv:2507.20673: the geometric mean of min(ρ|A|, clip(ρ)|A|), its sign A's
            sign = np.sign(advantages[0])
            bounded = np.minimum(sign * ratio, sign * np.clip(ratio, low, high)) * sign if sign else ratio
            return np.prod(bounded) ** (1 / len(logs)) * advantages
        case "vespo":  # arXiv:2602.10693: stopgrad(φ(w)) A log π, φ(w) = w^k e^(λ (1 - w)), w = π/μ of the whole
            w = np.prod(np.exp(frozen - previous) * np.maximum(weights, 1e-8))
            w = min(max(w, 1e-8), np.exp(20))
            k = np.where(advantages >= 0, config.vespo_power_positive, config.vespo_power_negative)
            lam = np.where(advantages >= 0, config.vespo_decay_positive, config.vespo_decay_negative)
            return w**k * np.exp(lam * (1 - w)) * advantages * current
        case "policy_gradient":  # Williams, 1992
            return advantages * current


def divergence(config, reference, current, frozen, previous, generation):
    """The KL estimates (Schulman, 2020), weighed by π/π' (arXiv:2512.02556); π' is the policy itself for "none"."""
    delta = reference - current
    kl = {"k1": -delta, "k2": delta**2 / 2, "k3": np.exp(delta) - 1 - delta}[config.kl_estimator]
    moving = current if config.kl_gradient == "expectation" else frozen
    if config.kl_importance == "ratio":  # TRL: the objective's own ratio
        logs = moving - previous
        score = np.exp({"token": logs, "sequence": np.full_like(logs, logs.mean())}[config.ratio])
    else:
        sampled_by = {"none": frozen, "previous": previous, "generation": generation}[config.kl_importance]
        score = np.exp(moving - sampled_by)
    most = np.inf if config.kl_maximum is None else config.kl_maximum
    return np.clip(np.clip(kl, -10, 10) * score, -most, most)

"""The names of advantages and the options of the policy-gradient loss, without torch."""

from math import inf
from typing import Annotated, Literal, Self, TypeAlias

from attrs import evolve, frozen

from rlcore.schema.constraints import Constraint, Positive, Share, above, above_at_most, at_least
from rlcore.spi import AlgorithmContext

Baseline: TypeAlias = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
AdvantageNormalisation: TypeAlias = Literal["std", "leave_one_out_std", "batch_std", "batch_whitening", "mean", "none"]
ObjectiveName: TypeAlias = Literal["clipped", "clip_cov", "kl_cov", "cispo", "sapo", "gmpo", "vespo", "policy_gradient"]
RatioLevel: TypeAlias = Literal["token", "sequence", "sequence_token", "sequence_product"]
Normalisation: TypeAlias = Literal["token", "sequence", "constant"]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]
KlGradient: TypeAlias = Literal["expectation", "estimate"]
ImportanceBound: TypeAlias = Literal["truncate", "mask"]

_NOT_NEGATIVE = Constraint("of at least 0; inf never clips", lambda value: value >= 0)
_POSITIVE = Constraint("above 0; inf never truncates", lambda value: value > 0)
_UNBOUNDED = Constraint("above 0; inf leaves out none", lambda value: value > 0)


# Without slots: a class has no two bases that have some.
@frozen(kw_only=True, slots=False)
class LossConfig:
    """Options of `rlcore_torchkit.rl.policy_gradient.policy_gradient_loss`, which reads nothing else."""

    objective: ObjectiveName = "clipped"
    """The objective, A being a token's advantage and ρ its ratio: "clipped" bounds Aρ (PPO, arXiv:1707.06347); "cispo" weighs
    log-probabilities by A and the clipped ρ, a constant (arXiv:2506.13585); "sapo" lets a sigmoid of ρ fade out instead of
    clipping (arXiv:2511.20347); "gmpo" takes the geometric mean of a sequence's clipped ratios (arXiv:2507.20673); "vespo"
    weighs log-probabilities by A and a kernel of the whole sequence's ratio (arXiv:2602.10693); "policy_gradient" by A alone
    (REINFORCE). "clip_cov" is "clipped" without a few tokens that would lower the entropy most, "kl_cov" is Aρ with a penalty
    on those (arXiv:2505.22617)."""
    ratio: RatioLevel = "token"
    """Whose ratio ρ of the policy to the previous one a token has: its own; its sequence's, the geometric mean over loss tokens
    (GSPO, arXiv:2507.18071, whose clip_low and clip_high are 3e-4 and 4e-4); the same with the gradient of the token alone
    (GSPO-token); or the product over the sequence (RLOO, arXiv:2402.14740)."""
    loss_normalisation: Normalisation = "token"
    """Mean over the tokens of the optimizer step; mean over its sequences of each one's mean; or sum over its tokens
    divided by its sequences times `constant_length`, which weighs a token alike in long and short answers."""
    constant_length: Positive | None = None
    """Tokens that `loss_normalisation = "constant"` divides by; none is rollout.max_response_tokens."""
    clip_low: Share = 0.2
    """The probability ratio is clipped from below at 1 - clip_low, by the objectives "clipped", "clip_cov", "cispo" and
    "gmpo"; 1 never clips."""
    clip_high: Annotated[float, _NOT_NEGATIVE] = 0.2
    """The probability ratio is clipped from above at 1 + clip_high; a larger one than clip_low keeps exploration alive."""
    dual_clip: Annotated[float, above(1)] | None = None
    """Bound the loss of a token of negative advantage A at dual_clip times -A (arXiv:1912.09729); None is no bound."""
    sapo_temperature_positive: Annotated[float, above(0)] = 1.0
    """With `objective = "sapo"`: how fast a token of positive advantage fades out as its ratio leaves 1."""
    sapo_temperature_negative: Annotated[float, above(0)] = 1.05
    """How fast one of negative advantage does."""
    vespo_power_positive: Annotated[float, at_least(0)] = 2.0
    """With `objective = "vespo"`: the power k of the sequence's ratio w in the kernel w^k exp(λ (1 - w)), at advantages of at
    least 0."""
    vespo_decay_positive: Annotated[float, at_least(0)] = 3.0
    """The kernel's λ at advantages of at least 0."""
    vespo_power_negative: Annotated[float, at_least(0)] = 3.0
    """The kernel's k at negative advantages."""
    vespo_decay_negative: Annotated[float, at_least(0)] = 2.0
    """The kernel's λ at negative advantages."""
    covariance_share: Annotated[float, above_at_most(0, 1)] = 2e-4
    """With "clip_cov" and "kl_cov": the share of the step's loss tokens that is chosen by (log π - its mean)(A - its mean), π
    the sampler's probability and the means those of the step: at random between the two bounds, or the greatest."""
    covariance_minimum: Annotated[float, at_least(0)] = 1.0
    """With "clip_cov": the least such product of a token that may be chosen."""
    covariance_maximum: Annotated[float, at_least(0)] = 5.0
    """With "clip_cov": the greatest."""
    covariance_penalty: Annotated[float, above(0)] = 1.0
    """With "kl_cov": weight of |log ρ| at the chosen tokens."""
    kl_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of the KL divergence from the reference policy; 0 needs no reference policy."""
    kl_estimator: KlEstimator = "k3"
    """Per-token estimator of that divergence (Schulman, "Approximating KL Divergence")."""
    kl_gradient: KlGradient = "expectation"
    """Follow the gradient of the estimator's expectation under the policy, or differentiate the estimates alone (with
    which "k1" has no effect on average)."""
    kl_importance: Literal["none", "previous", "generation"] = "none"
    """Weigh each token's estimate by the policy's probability over that of the policy named, which drew the token: then it
    estimates the divergence of the policy as it is in later updates too (DeepSeek-V3.2, arXiv:2512.02556)."""
    importance_correction: Literal["token", "sequence", "none"] = "token"
    """Weigh each token by the ratio of the trainer's to the generator's probability, both at the start of the step, of the
    token or of its whole sequence, so that a numerical difference between the two does not bias the gradient. 1 where
    previous_logprobs is "generation"."""
    importance_bound: ImportanceBound = "truncate"
    """A weight outside its bounds becomes the nearest bound (truncated importance sampling), or 0 (IcePop,
    arXiv:2510.18855)."""
    importance_minimum: Annotated[float, at_least(0)] = 0.0
    """Lower bound of that weight."""
    importance_maximum: Annotated[float, _POSITIVE] = 2.0
    """Upper bound of that weight."""
    geometric_minimum: Annotated[float, at_least(0)] = 0.0
    """Leave out a sequence where the geometric mean of its tokens' ratios, trainer to generator, is below this."""
    geometric_maximum: Annotated[float, _UNBOUNDED] = inf
    """Leave out a sequence where that mean is above this."""
    off_policy_maximum: Annotated[float, above(0)] | None = None
    """Leave out tokens of negative advantage in a sequence whose mean of log-probabilities, generator's less policy's, is above
    this many nats (DeepSeek-V3.2's off-policy sequence mask, arXiv:2512.02556, equation 9); None leaves out none."""
    entropy_minimum: Annotated[float, above(0)] | None = None
    """Optimise tokens alone at which the policy's entropy is at least this many nats: the forking tokens of arXiv:2506.01939,
    which takes the 20 % of most entropy in a batch; None is all tokens."""
    previous_logprobs: Literal["auto", "trainer", "generation"] = "auto"
    """Whose log-probabilities at the start of the step the probability ratio is taken against: "trainer" computes them
    where a step has several updates; "generation" takes those that the sampler gave; "auto" does so where they are exact, in
    float32 and with nothing in fewer bits on either side, but not with "kl_cov" or geometric bounds, which need the
    trainer's."""
    entropy_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of an entropy bonus."""
    entropy_metric: Literal["exact", "estimate"] = "exact"
    """Report the entropy computed over the vocabulary, or estimate it from the sampled tokens at no cost."""

    @property
    def masks_by_geometric_mean(self) -> bool:
        """Return whether a sequence can be left out for its distance from the generator's."""
        return self.geometric_minimum > 0 or self.geometric_maximum < inf

    @property
    def chooses_by_covariance(self) -> bool:
        """Return whether the loss reads the column of tokens chosen by their covariance."""
        return self.objective in ("clip_cov", "kl_cov")

    @property
    def needs_trainers_logprobs(self) -> bool:
        """Return whether the generator's log-probabilities at the start of the step cannot stand for the trainer's, however
        exact they are. Geometric bounds compare the two. The gradient of KL-Cov's |log ρ| is that of its sign, which at weights
        that have not moved is the sign of a rounding."""
        return self.masks_by_geometric_mean or self.objective == "kl_cov"

    @property
    def corrects_staleness(self) -> bool:
        """Return whether samples of earlier weights are weighed by what the policy makes of them. Of resolved options."""
        if self.previous_logprobs == "generation":
            return self.objective != "policy_gradient"
        return self.importance_correction != "none"

    def resolved(self, context: AlgorithmContext) -> Self:
        """The options of a run: `previous_logprobs` is "trainer" or "generation", and `constant_length`, where it is read, a
        length."""
        config = self
        if config.loss_normalisation == "constant" and config.constant_length is None:
            config = evolve(config, constant_length=context.max_response_tokens)
        if config.previous_logprobs != "auto":
            return config
        takes_generators = context.generation_logprobs_exact and not config.needs_trainers_logprobs
        return evolve(config, previous_logprobs="generation" if takes_generators else "trainer")

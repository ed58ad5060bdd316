"""The names of advantages and the options of the policy-gradient loss, without torch."""

from math import inf
from typing import Annotated, Literal, Self, TypeAlias

from attrs import evolve, frozen

from rlcore.schema.constraints import Constraint, Positive, Share, above, above_at_most, at_least
from rlcore.spi import AlgorithmContext

Baseline: TypeAlias = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
AdvantageNormalisation: TypeAlias = Literal[
    "std", "leave_one_out_std", "batch_std", "batch_whitening", "sample_whitening", "mean", "none"
]
ObjectiveName: TypeAlias = Literal["clipped", "clip_cov", "kl_cov", "cispo", "sapo", "gmpo", "vespo", "policy_gradient"]
RatioLevel: TypeAlias = Literal["token", "sequence", "sequence_token", "sequence_product"]
Normalisation: TypeAlias = Literal["token", "sequence", "constant"]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3"]
KlGradient: TypeAlias = Literal["expectation", "estimate"]
ImportanceBound: TypeAlias = Literal["truncate", "mask"]

_ABOVE_MINUS_ONE = Constraint("above -1; inf never clips", lambda value: value > -1)
_POSITIVE = Constraint("above 0; inf never truncates", lambda value: value > 0)
_UNBOUNDED = Constraint("above 0; inf leaves out none", lambda value: value > 0)


# Without slots: a class has no two bases that have some.
@frozen(kw_only=True, slots=False)
class LossConfig:
    """Options of `rlcore_torchkit.rl.policy_gradient.policy_gradient_loss`, which reads nothing else."""

    objective: ObjectiveName = "clipped"
    """The objective of a token with advantage A and ratio ρ. "clipped": a clipped Aρ (PPO, arXiv:1707.06347). "cispo":
    log-probabilities weighted by A and the clipped ρ, a constant (arXiv:2506.13585). "sapo": a sigmoid of ρ fades out instead
    of clipping (arXiv:2511.20347). "gmpo": the geometric mean of a sequence's clipped ratios (arXiv:2507.20673). "vespo":
    log-probabilities weighted by A and a kernel of the sequence's ratio (arXiv:2602.10693). "policy_gradient":
    log-probabilities weighted by A (REINFORCE). "clip_cov": "clipped" without a few tokens that would lower the entropy most.
    "kl_cov": Aρ with a penalty on those tokens (both arXiv:2505.22617)."""
    ratio: RatioLevel = "token"
    """The ratio ρ of the policy to the previous one. "token": the token's own. "sequence": the geometric mean over the
    sequence's loss tokens (GSPO, arXiv:2507.18071, with clip_low = 3e-4 and clip_high = 4e-4). "sequence_token": the same, with
    the token's own gradient (GSPO-token). "sequence_product": the product over the sequence (RLOO, arXiv:2402.14740)."""
    loss_normalisation: Normalisation = "token"
    """The mean of the loss. "token": over the tokens of the optimizer step. "sequence": over its sequences, of each sequence's
    mean. "constant": the sum over its tokens, divided by its sequences times `constant_length`. A token then has the same
    weight in long and short answers."""
    constant_length: Positive | None = None
    """Tokens that `loss_normalisation = "constant"` divides by; None is rollout.max_response_tokens."""
    clip_low: Share = 0.2
    """The probability ratio is clipped from below at 1 - clip_low, by the objectives "clipped", "clip_cov", "cispo" and
    "gmpo"; 1 never clips."""
    clip_high: Annotated[float, _ABOVE_MINUS_ONE] = 0.2
    """The probability ratio is clipped from above at 1 + clip_high; a larger one than clip_low keeps exploration alive. A
    negative one caps the weights of "cispo" below 1."""
    dual_clip: Annotated[float, above(1)] | None = None
    """Bound the loss of a token of negative advantage A at dual_clip times -A (arXiv:1912.09729); None is no bound."""
    sapo_temperature_positive: Annotated[float, above(0)] = 1.0
    """With `objective = "sapo"`: how fast a token of positive advantage fades out as its ratio leaves 1."""
    sapo_temperature_negative: Annotated[float, above(0)] = 1.05
    """With `objective = "sapo"`: how fast a token of negative advantage fades out."""
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
    """The share of the step's loss tokens that "clip_cov" and "kl_cov" choose. A token's covariance is (log π - its mean)(A -
    its mean), with the sampler's probability π and means over the step. "clip_cov" chooses at random between the two bounds;
    "kl_cov" chooses the greatest."""
    covariance_minimum: Annotated[float, at_least(0)] = 1.0
    """With "clip_cov": the least covariance of a token that may be chosen."""
    covariance_maximum: Annotated[float, at_least(0)] = 5.0
    """With "clip_cov": the greatest covariance of a token that may be chosen."""
    covariance_penalty: Annotated[float, above(0)] = 1.0
    """With "kl_cov": weight of |log ρ| at the chosen tokens."""
    kl_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of the KL divergence from the reference policy; 0 needs no reference policy."""
    kl_estimator: KlEstimator = "k3"
    """Per-token estimator of that divergence (Schulman, "Approximating KL Divergence")."""
    kl_gradient: KlGradient = "expectation"
    """The gradient of the KL term. "expectation": of the estimator's expectation under the policy. "estimate": of the estimates
    alone, with which "k1" has no effect on average."""
    kl_importance: Literal["none", "previous", "generation", "ratio"] = "none"
    """Weight each token's estimate by its probability under the policy over that under the named policy, which sampled it. It
    then estimates the KL of the current policy in later updates too (DeepSeek-V3.2, arXiv:2512.02556). "ratio": by the ratio ρ
    of the objective, which may be the sequence's, as in TRL's GSPO."""
    kl_maximum: Annotated[float, above(0)] | None = None
    """Bound of a token's estimate times that weight; beyond it the token has no gradient, as in NeMo-RL. None: the estimate
    alone is bounded, by 10, and its weight by e^20."""
    likelihood_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of the negative log-likelihood of samples with a reward above 0, a mean over their tokens in the step (VAPO,
    arXiv:2504.05118, equation 10)."""
    importance_correction: Literal["token", "sequence", "none"] = "token"
    """Weight each token by the ratio of the trainer's to the generator's probability at the start of the step, so that a
    numerical difference does not bias the gradient. "token": the token's own ratio. "sequence": its sequence's. "none": no
    weight. The weight is 1 if previous_logprobs is "generation"."""
    importance_bound: ImportanceBound = "truncate"
    """What a weight outside its bounds becomes. "truncate": the nearest bound (truncated importance sampling). "mask": 0
    (IcePop, arXiv:2510.18855)."""
    importance_minimum: Annotated[float, at_least(0)] = 0.0
    """Lower bound of that weight."""
    importance_maximum: Annotated[float, _POSITIVE] = 2.0
    """Upper bound of that weight."""
    geometric_minimum: Annotated[float, at_least(0)] = 0.0
    """Mask a sequence if the geometric mean of its tokens' ratios, trainer to generator, is below this."""
    geometric_maximum: Annotated[float, _UNBOUNDED] = inf
    """Mask a sequence if that mean is above this."""
    off_policy_maximum: Annotated[float, above(0)] | None = None
    """Mask tokens of negative advantage in a sequence if the mean of generator's minus policy's log-probabilities is above this
    many nats (DeepSeek-V3.2's off-policy sequence mask, arXiv:2512.02556, equation 9). None masks nothing."""
    entropy_minimum: Annotated[float, above(0)] | None = None
    """Train only on tokens at which the policy's entropy is at least this many nats: the forking tokens of arXiv:2506.01939,
    which takes the 20 % of highest entropy in a batch. None is all tokens."""
    previous_logprobs: Literal["auto", "trainer", "generation"] = "auto"
    """The source of the ratio's denominator, the log-probabilities at the start of the step. "trainer": the trainer computes
    them if a step has several updates. "generation": the sampler's. "auto": "generation" if they are exact, in float32 on both
    sides, and neither "kl_cov" nor a geometric bound needs the trainer's; else "trainer"."""
    entropy_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of an entropy bonus."""
    entropy_metric: Literal["exact", "estimate"] = "exact"
    """The entropy that is reported. "exact": computed over the vocabulary. "estimate": from the sampled tokens, at no cost."""

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

"""`[algorithm.ppo]`: every option of PPO and its meaning."""

from typing import Annotated, Literal

from attrs import evolve, frozen

from rlcore.schema.constraints import Constraint, Share, above, above_at_most, at_least
from rlcore.spi import AlgorithmContext
from rlcore_torchkit.rl.endpoint_config import EndpointConfig
from rlcore_torchkit.rl.loss_config import KlEstimator

_NOT_NEGATIVE = Constraint("of at least 0; inf never clips", lambda value: value >= 0)
_POSITIVE = Constraint("above 0; inf never clips", lambda value: value > 0)
_TRUNCATES = Constraint("above 0; inf never truncates", lambda value: value > 0)


@frozen(kw_only=True)
class PpoConfig:
    """Proximal policy optimisation (arXiv:1707.06347) with a critic, whose own options are in [critic]."""

    gamma: Annotated[float, above_at_most(0, 1)] = 1.0
    """Discount γ per generated token."""
    gae_lambda: Share = 0.95
    """λ of generalised advantage estimation (arXiv:1506.02438). 1 uses the full return; 0 uses the critic from the next token
    on."""
    advantage_normalisation: Literal["batch_whitening", "none"] = "batch_whitening"
    """The normalisation of advantages. "batch_whitening": subtract their mean over the step's tokens, then divide by their
    standard deviation. "none": leave them."""
    advantage_epsilon: Annotated[float, at_least(0)] = 1e-8
    """Added to that standard deviation."""
    bootstrap_truncated: bool = False
    """True: the return of an episode that a limit of tokens or turns truncated includes the critic's value after its last
    generated token. False: it includes nothing, as at a true end."""
    clip_low: Share = 0.2
    """The probability ratio is clipped from below at 1 - clip_low; 1 never clips."""
    clip_high: Annotated[float, _NOT_NEGATIVE] = 0.2
    """The probability ratio is clipped from above at 1 + clip_high."""
    dual_clip: Annotated[float, above(1)] | None = None
    """Bound the loss of a token of negative advantage A at dual_clip times -A (arXiv:1912.09729); None is no bound."""
    value_clip: Annotated[float, _POSITIVE] = 0.2
    """Value clipping range (arXiv:2005.12729), in the units of rewards. A token has no gradient once its value has moved
    further than this, towards the return or past it, since the step began. inf never clips."""
    loss_normalisation: Literal["token", "sequence"] = "token"
    """The mean of the policy's loss. "token": over the tokens of the optimizer step. "sequence": over its sequences, of each
    sequence's mean. The critic's loss is the mean over tokens."""
    kl_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of the KL divergence from the reference policy, which is subtracted from each token's reward (arXiv:2203.02155).
    0 needs no reference policy."""
    kl_estimator: KlEstimator = "k1"
    """Per-token estimator of that divergence (Schulman, "Approximating KL Divergence")."""
    reference_endpoint: EndpointConfig | None = None
    """The reference policy behind an endpoint, with a `kl_coefficient`; it has the policy's tokenizer. None: the trainer holds
    the reference."""
    entropy_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of an entropy bonus."""
    likelihood_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of the negative log-likelihood of samples with a reward above 0, a mean over their tokens in the step (VAPO,
    arXiv:2504.05118, equation 10)."""
    previous_logprobs: Literal["auto", "trainer", "generation"] = "auto"
    """The source of the ratio's denominator, the log-probabilities at the start of the step. "trainer": the trainer computes
    them if a step has several updates. "generation": the sampler's. "auto": "generation" if they are exact, in float32 on both
    sides; else "trainer"."""
    importance_correction: Literal["token", "none"] = "token"
    """The weight against bias by a difference of trainer and generator. "token": the ratio of the trainer's to the generator's
    probability of the token at the start of the step; 1 if previous_logprobs is "generation". "none": no weight."""
    importance_maximum: Annotated[float, _TRUNCATES] = 2.0
    """Upper bound of that weight: a greater one is truncated to it."""

    @property
    def corrects_staleness(self) -> bool:
        """Return whether samples of earlier weights are weighed by what the policy makes of them. Of resolved options."""
        return self.previous_logprobs == "generation" or self.importance_correction != "none"

    def resolved(self, context: AlgorithmContext) -> "PpoConfig":
        """The options of a run: `previous_logprobs` is "trainer" or "generation"."""
        if self.previous_logprobs != "auto":
            return self
        return evolve(self, previous_logprobs="generation" if context.generation_logprobs_exact else "trainer")

"""`[algorithm.ppo]`: every option of PPO and its meaning."""

from typing import Annotated, Literal

from attrs import evolve, frozen

from rlcore.schema.constraints import Constraint, Share, above, above_at_most, at_least
from rlcore.spi import AlgorithmContext
from rlcore_torchkit.rl.loss_config import KlEstimator

_NOT_NEGATIVE = Constraint("of at least 0; inf never clips", lambda value: value >= 0)
_POSITIVE = Constraint("above 0; inf never clips", lambda value: value > 0)
_TRUNCATES = Constraint("above 0; inf never truncates", lambda value: value > 0)


@frozen(kw_only=True)
class PpoConfig:
    """Proximal policy optimisation (arXiv:1707.06347) with a critic, whose own options are in [critic]."""

    gamma: Annotated[float, above_at_most(0, 1)] = 1.0
    """Discount γ of what is earned one generated token later."""
    gae_lambda: Share = 0.95
    """λ of generalised advantage estimation (arXiv:1506.02438): 1 takes what was earned in full, 0 relies on the critic from
    the next token on."""
    advantage_normalisation: Literal["batch_whitening", "none"] = "batch_whitening"
    """Take the mean of the advantages of the step's tokens from each, and divide by their standard deviation; or leave them."""
    advantage_epsilon: Annotated[float, at_least(0)] = 1e-8
    """Added to that standard deviation."""
    bootstrap_truncated: bool = False
    """An episode that a limit of tokens or turns cut off would have gone on: count the critic's value behind its last generated
    token as what it would have earned. False counts nothing, as at a true end."""
    clip_low: Share = 0.2
    """The probability ratio is clipped from below at 1 - clip_low; 1 never clips."""
    clip_high: Annotated[float, _NOT_NEGATIVE] = 0.2
    """The probability ratio is clipped from above at 1 + clip_high."""
    dual_clip: Annotated[float, above(1)] | None = None
    """Bound the loss of a token of negative advantage A at dual_clip times -A (arXiv:1912.09729); None is no bound."""
    value_clip: Annotated[float, _POSITIVE] = 0.2
    """The critic learns nothing from a token once its value has moved by more than this from where the step began, towards the
    return or past it (arXiv:2005.12729); in the units of rewards. inf never clips."""
    loss_normalisation: Literal["token", "sequence"] = "token"
    """The policy's loss is the mean over the tokens of the optimizer step, or over its sequences of each one's mean. The
    critic's is the mean over tokens."""
    kl_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of the KL divergence from the reference policy, which is taken off the reward of each token (arXiv:2203.02155); 0
    needs no reference policy."""
    kl_estimator: KlEstimator = "k1"
    """Per-token estimator of that divergence (Schulman, "Approximating KL Divergence")."""
    entropy_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of an entropy bonus."""
    previous_logprobs: Literal["auto", "trainer", "generation"] = "auto"
    """Whose log-probabilities at the start of the step the probability ratio is taken against: "trainer" computes them
    where a step has several updates; "generation" takes those that the sampler gave; "auto" does so where they are exact, in
    float32 and with nothing in fewer bits on either side."""
    importance_correction: Literal["token", "none"] = "token"
    """Weigh each token by the ratio of the trainer's to the generator's probability, both at the start of the step, so that a
    difference between the two does not bias the gradient. 1 where previous_logprobs is "generation"."""
    importance_maximum: Annotated[float, _TRUNCATES] = 2.0
    """Upper bound of that weight, to which a greater one is cut."""

    @property
    def corrects_staleness(self) -> bool:
        """Return whether samples of earlier weights are weighed by what the policy makes of them. Of resolved options."""
        return self.previous_logprobs == "generation" or self.importance_correction != "none"

    def resolved(self, context: AlgorithmContext) -> "PpoConfig":
        """The options of a run: `previous_logprobs` is "trainer" or "generation"."""
        if self.previous_logprobs != "auto":
            return self
        return evolve(self, previous_logprobs="generation" if context.generation_logprobs_exact else "trainer")

"""What `[algorithm.grpo]` says about the loss; the loss itself reads nothing else."""

from typing import Annotated, Literal, Self

from attrs import evolve, frozen

from rlcore.schema.constraints import Constraint, Positive, above, at_least, at_least_below
from rlcore.spi import AlgorithmContext

_NOT_NEGATIVE = Constraint("of at least 0; inf never clips", lambda value: value >= 0)
_POSITIVE = Constraint("above 0; inf never truncates", lambda value: value > 0)


# Without slots: a class has no two bases that have some.
@frozen(kw_only=True, slots=False)
class LossConfig:
    """Options of the policy-gradient loss."""

    loss_normalisation: Literal["token", "sequence", "constant"] = "token"
    """Mean over the tokens of the optimizer step; mean over its sequences of each one's mean; or sum over its tokens
    divided by its sequences times `constant_length`, which weighs a token alike in long and short answers."""
    constant_length: Positive | None = None
    """Tokens that `loss_normalisation = "constant"` divides by, usually rollout.max_response_tokens."""
    clip_low: Annotated[float, at_least_below(0, 1)] = 0.2
    """The probability ratio is clipped from below at 1 - clip_low."""
    clip_high: Annotated[float, _NOT_NEGATIVE] = 0.2
    """The probability ratio is clipped from above at 1 + clip_high; a larger one than clip_low keeps exploration alive."""
    dual_clip: Annotated[float, above(1)] | None = None
    """Bound the loss of a token of negative advantage A at dual_clip times -A (arXiv:1912.09729); None is no bound."""
    kl_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of the KL divergence from the reference policy; 0 needs no reference policy."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of that divergence (Schulman, "Approximating KL Divergence")."""
    kl_gradient: Literal["expectation", "estimate"] = "expectation"
    """Follow the gradient of the estimator's expectation under the policy, or differentiate the estimates alone (with
    which "k1" has no effect on average)."""
    importance_correction: Literal["token", "none"] = "token"
    """Weigh each token by the ratio of the trainer's to the generator's probability, both at the start of the step, so
    that a numerical difference between the two does not bias the gradient. 1 where previous_logprobs is "generation"."""
    importance_maximum: Annotated[float, _POSITIVE] = 2.0
    """Upper bound of that weight (truncated importance sampling)."""
    previous_logprobs: Literal["auto", "trainer", "generation"] = "auto"
    """Whose log-probabilities at the start of the step the probability ratio is taken against: "trainer" computes them
    where a step has several updates; "generation" takes those that the sampler gave; "auto" does so where they are exact."""
    entropy_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of an entropy bonus."""
    entropy_metric: Literal["exact", "estimate"] = "exact"
    """Report the entropy computed over the vocabulary, or estimate it from the sampled tokens at no cost."""

    def resolved(self, context: AlgorithmContext) -> Self:
        """The options of a run: `previous_logprobs` is "trainer" or "generation"."""
        if self.previous_logprobs != "auto":
            return self
        return evolve(self, previous_logprobs="generation" if context.generation_logprobs_exact else "trainer")

"""`[algorithm.distill]` and `[environment.unrewarded]`."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Constraint, Share

_POSITIVE = Constraint("above 0; inf never truncates", lambda value: value > 0)


@frozen(kw_only=True)
class DistillConfig:
    """Learning from the log-probabilities of a teacher, the model that [reference] names."""

    samples: Literal["student", "teacher"] = "student"
    """Whose texts are learned from. "student": what the policy says itself, by the reverse KL divergence from the teacher
    (on-policy distillation, arXiv:2306.13649). "teacher": prompts and completions of the data set, which the teacher wrote, by
    the forward KL divergence."""
    discount: Share = 0.0
    """With "student", how much a token answers for the divergence of later ones: 0 for its own alone, 1 for that of all that
    follows, whose gradient is that of whole sequences' divergence and has more noise."""
    importance_maximum: Annotated[float, _POSITIVE] = 2.0
    """With "student", upper bound of the ratio of a token's probability to that which it was sampled with (truncated importance
    sampling)."""


@frozen(kw_only=True)
class UnrewardedConfig:
    """The environment without rewards has no options."""

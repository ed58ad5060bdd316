"""`[algorithm.distill]` and `[environment.unrewarded]`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Share, above
from rlcore_torchkit.rl.endpoint_config import EndpointConfig

_POSITIVE = Constraint("above 0; inf never truncates", lambda value: value > 0)


@frozen(kw_only=True)
class TeacherConfig(EndpointConfig):
    """`[algorithm.distill.teachers.NAME]`: a teacher behind vLLM's OpenAI server or `rlcore serve`, which score prompts."""

    weight: Annotated[float, above(0)] = 1.0
    """Weight of this teacher's divergence in the loss, in relation to the other teachers' weights."""


@frozen(kw_only=True)
class DistillConfig:
    """Learning from the log-probabilities of a teacher: the model that [reference] names, or models behind endpoints."""

    samples: Literal["student", "teacher"] = "student"
    """The source of the training texts. "student": the policy's own samples, by the reverse KL divergence from the teacher
    (on-policy distillation, arXiv:2306.13649). "teacher": prompts and completions of the data set, which the teacher wrote, by
    the forward KL divergence."""
    discount: Share = 0.0
    """With "student", the discount of later tokens' KL in a token's return. 0 counts the token's own KL. 1 counts all later
    tokens: the gradient of the whole sequence's KL, with more noise."""
    importance_maximum: Annotated[float, _POSITIVE] = 2.0
    """With "student", upper bound of the importance ratio: a token's probability over that at sampling (truncated importance
    sampling)."""
    teachers: Mapping[str, TeacherConfig] = field(factory=dict)
    """Teachers behind endpoints, by names of your own, in place of [reference]: a table [algorithm.distill.teachers.NAME] for
    each. With "student". Of several the loss has the weighted mean of the reverse KL divergences. They have the policy's
    tokenizer."""


@frozen(kw_only=True)
class UnrewardedConfig:
    """The environment without rewards has no options."""

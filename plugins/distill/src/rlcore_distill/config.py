"""`[algorithm.distill]` and `[environment.unrewarded]`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Share, above
from rlcore_torchkit.rl.endpoint_config import EndpointConfig

ABOVE_0 = Constraint("above 0; inf never truncates", lambda value: value > 0)


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
    beta: Share | None = None
    """The divergence of each token: GKD's generalised Jensen-Shannon divergence (arXiv:2306.13649, equation 1). 1 is the
    reverse KL divergence, 0 the forward one. Between them it is beta KL(teacher ‖ M) + (1 - beta) KL(policy ‖ M), with M = beta
    teacher + (1 - beta) policy. None is 1 on the policy's samples and 0 on the teacher's texts."""
    lmbda: Share = 1.0
    """With "student", GKD's lambda: the weight of the policy's own samples in the loss. The rest is that of the `completion` of
    each prompt's row, which the teacher wrote."""
    discount: Share = 0.0
    """With "student", the discount of later tokens' divergence in a token's return. 0 counts the token's own. 1 counts all
    later tokens: the gradient of the whole sequence's divergence, with more noise."""
    importance_maximum: Annotated[float, ABOVE_0] = 2.0
    """Upper bound of the importance ratio (truncated importance sampling): a token's probability over that at sampling, and of
    a teacher's text, with a `beta` above 0, over the teacher's."""
    teachers: Mapping[str, TeacherConfig] = field(factory=dict)
    """Teachers behind endpoints, by names of your own, in place of [reference]: a table [algorithm.distill.teachers.NAME] for
    each. With "student". Of several the loss has the weighted mean of the reverse KL divergences. They have the policy's
    tokenizer."""

    @property
    def beta_of_samples(self) -> float:
        """Return `beta` on the policy's samples."""
        return 1.0 if self.beta is None else self.beta

    @property
    def beta_of_texts(self) -> float:
        """Return `beta` on the teacher's texts."""
        return self.beta or 0.0


@frozen(kw_only=True)
class UnrewardedConfig:
    """The environment without rewards has no options."""

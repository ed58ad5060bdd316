"""`[algorithm.sdft]` and `[algorithm.sdpo]`: self-distillation from the policy's own model behind another prompt."""

from typing import Annotated, ClassVar, Literal

from attrs import frozen

from rlcore.schema.constraints import Finite, Share, Text
from rlcore_distill.config import ABOVE_0


@frozen(kw_only=True)
class SelfDistillConfig:
    """Options of both kinds of self-distillation: the reverse KL divergence from a teacher that reads a demonstration too."""

    section: ClassVar[str]
    """The section of a recipe that these options are of."""

    teacher: Literal["policy", "reference"] = "reference"
    """The weights of the teacher. "reference": frozen ones, which are the policy's initial weights or the model that
    [reference] names. "policy": the policy's own, as each step finds them."""
    discount: Share = 0.0
    """The discount of later tokens' KL in a token's return. 0 counts the token's own KL. 1 counts all later tokens."""
    importance_maximum: Annotated[float, ABOVE_0] = 2.0
    """Upper bound of the importance ratio: a token's probability over that at sampling (truncated importance sampling)."""


@frozen(kw_only=True)
class SdftConfig(SelfDistillConfig):
    """Self-distillation fine-tuning (SDFT): the teacher reads the demonstration that a prompt's row has."""

    section = "algorithm.sdft"

    demonstration_field: Text = "privileged_context"
    """The rows' field with the demonstration, a text."""
    teacher_prompt_template: Text = "{prompt}\n\n{demonstration}"
    """The teacher's text in place of the prompt's: in a chat, of the last user message."""


@frozen(kw_only=True)
class SdpoConfig(SelfDistillConfig):
    """Self-distillation policy optimization (SDPO): the teacher reads an answer of the prompt's group that succeeded, and the
    row's feedback. Samples of which there is neither teach nothing."""

    section = "algorithm.sdpo"

    success_reward_threshold: Finite = 1.0
    """The reward at which an answer succeeds. A sample's teacher reads the group's first such answer, never the sample
    itself."""
    feedback_field: Text | None = None
    """The rows' field with feedback, a text, for samples of every reward. None where rows have none; empty texts are none."""
    reprompt_template: Text = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
    """The teacher's text in place of the prompt's: in a chat, of the last user message."""
    solution_template: Text = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
    """The text for {solution}; empty where no answer succeeded."""
    feedback_template: Text = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
    """The text for {feedback}; empty without feedback."""

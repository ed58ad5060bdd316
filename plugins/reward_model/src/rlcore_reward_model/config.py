"""`[algorithm.bradley_terry]` and `[environment.reward_model]`: every option and its meaning."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Finite, PathText, Positive, at_least


@frozen(kw_only=True)
class RewardConfig:
    """A reward model of pairs of a chosen and a rejected answer, after Bradley and Terry (arXiv:2009.01325, section 3.4): the
    model's value r at the last token is to be higher for the chosen one."""

    center_rewards_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of the mean of (r_chosen + r_rejected)^2 beside the loss, which keeps rewards around 0: the loss alone says
    nothing of what is added to both (arXiv:2312.09244). 0.01 is usual."""


@frozen(kw_only=True)
class RewardModelConfig:
    """`[environment.reward_model]`: answers are scored by a sequence classifier with one label; prompts come from `[data]`."""

    path: PathText
    """The reward model: a directory that transformers loads as a sequence classifier with one label, as seen from the working
    directory, such as `model` in the directory of a run with the algorithm `bradley_terry`; or a name on the Hub. Its tokenizer
    may be another than the policy's: it reads the text."""
    prompt_format: Literal["text", "chat"] = "text"
    """"text": a prompt that is a text is shown as it is. "chat": it is a user's message for the chat template, of the policy
    and of the reward model each its own. A prompt that is a list of messages goes through them in either case."""
    system_prompt: str | None = None
    """A system message before it; only for "chat"."""
    success_reward: Finite = 0.0
    """The reward from which on a sample counts as solved."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device of the reward model; "cuda" is the first device that the run sees. Of a model in a local directory, what is
    planned for trainer and generator there leaves room for it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of its computation."""
    max_batch: Positive = 16
    """Most answers that are scored at once. Those that come while others are scored wait and go together."""

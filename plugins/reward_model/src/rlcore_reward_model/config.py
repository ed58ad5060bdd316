"""`[algorithm.bradley_terry]` and `[environment.reward_model]`: every option and its meaning."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Finite, PathText, Positive, at_least


@frozen(kw_only=True)
class RewardConfig:
    """A reward model of pairs of a chosen and a rejected answer, after Bradley and Terry (arXiv:2009.01325, section 3.4). It
    raises the model's value r at the chosen answer's last token above that of the rejected one."""

    center_rewards_coefficient: Annotated[float, at_least(0)] = 0.0
    """Weight of an extra loss, the mean of (r_chosen + r_rejected)^2, which keeps rewards around 0 (arXiv:2312.09244). Without
    it a constant added to both rewards changes nothing. 0.01 is usual."""


@frozen(kw_only=True)
class RewardModelConfig:
    """`[environment.reward_model]`: answers are scored by a sequence classifier with one label; prompts come from `[data]`."""

    path: PathText
    """The reward model: a name on the Hub, or a directory that transformers loads as a sequence classifier with one label, seen
    from the working directory. A run with the algorithm `bradley_terry` writes one, `model` in its run directory. Its tokenizer
    may differ from the policy's: it reads the text."""
    prompt_format: Literal["text", "chat"] = "text"
    """The form of a prompt that is a text. "text": the prompt as it is. "chat": a user's message for the policy's and the
    reward model's chat templates. A prompt that is a list of messages goes through the templates in either case."""
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

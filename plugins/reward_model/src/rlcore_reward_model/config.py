"""`[algorithm.bradley_terry]` and `[environment.reward_model]`: every option and its meaning."""

from typing import Annotated, Literal

from attrs import frozen

from rlcore.schema.constraints import Finite, PathText, Positive, Seconds, Text, at_least


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
    step_separator: Text | None = None
    """The text that ends a step of an answer, such as "\\n\\n", for process supervision. The model scores each beginning that
    ends with it, as if the answer ended there, and the whole answer; their values are the rewards of the steps
    (StepResult.part_rewards). None: one value, that of the whole answer."""
    success_reward: Finite = 0.0
    """The value of the whole answer from which on a sample counts as solved."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device of the reward model; "cuda" is the first device that the run sees. Of a model in a local directory, what is
    planned for trainer and generator there leaves room for it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of its computation."""
    max_batch: Positive = 16
    """Most answers that are scored at once. Those that come while others are scored wait and go together."""
    base_urls: tuple[Text, ...] = ()
    """Addresses of vLLM's servers that serve the model (`vllm serve MODEL --runner pooling`), such as ["http://127.0.0.1:8001"].
    They compute in place of a process of the run, on devices of their own, and share the answers. `path` then names the
    tokenizer, and device, dtype and max_batch say nothing."""
    model: Text | None = None
    """The servers' name of the model; None where each has one alone."""
    api_key_env: str | None = None
    """The environment variable with the servers' key; none where they ask for none. The key itself is written nowhere."""
    timeout_s: Seconds = 20.0
    """Most seconds for one request to a server."""
    max_attempts: Positive = 3
    """Attempts per request. It is retried after a lost connection, a timeout and the states 408, 409, 429 and 5xx, at another
    server where there is one. Pauses grow, or follow the server's request."""
    max_concurrent: Positive = 256
    """Most answers that each server is asked about at once; the others wait."""

"""Options of the environment `function`."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from attrs import field, frozen

from rlcore.schema.constraints import Constraint, Finite, FunctionText, Positive, Text

_FINITE = Constraint("of finite numbers", lambda value: all(map(math.isfinite, value.values())))


@frozen(kw_only=True)
class PromptConfig:
    """How a row's `prompt` is shown to the policy."""

    prompt_format: Literal["text", "chat"] = "text"
    """The form of a prompt that is a text. "text": the prompt as it is. "chat": a user's message for the chat template. A
    prompt that is a list of messages goes through the chat template in either case."""
    system_prompt: str | None = None
    """A system message before it; only for "chat"."""
    success_reward: Finite = 1.0
    """The reward from which on a sample counts as solved, where nothing else says."""


@frozen(kw_only=True)
class FunctionConfig(PromptConfig):
    """`[environment.function]`: what rewards a sample; prompts come from `[data]`."""

    path: FunctionText | tuple[FunctionText, ...] | None = None
    """A function, or an array of several, as "rewards.py:score" (a file beside the recipe) or "package.module:score". Each is
    called with those of `prompt`, `completion` and `row` that it takes, and with fields of the row by their names. It returns a
    number, or a mapping with `reward`, `success`, `failure`, `part_rewards` and further numbers. Functions of TRL, verl and
    NeMo-RL have their own forms, which the names of their arguments tell."""
    weights: Annotated[Mapping[str, float], _FINITE] = field(factory=dict)
    """The weight of each part of the reward, by a function's name, or a name in the mappings that functions return. Functions
    count 1.0 unless they are named here."""
    pass_environment: tuple[Text, ...] = ()
    """Names of further environment variables of the run that the worker processes get. They always get those that programs
    need, such as PATH, HOME and LANG. An `async def` runs in the process of the run, and sees all variables."""
    max_concurrent: Positive | None = None
    """Most calls at once. None: one for each core that the run may use, at most 32, where functions are computed in worker
    processes; 64 where all of them are `async def`."""

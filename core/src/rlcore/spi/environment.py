"""What an environment is: it starts an episode from a task and answers each of the policy's turns.

Verifiable rewards are one-turn episodes. State is explicit, so that one environment object serves any number of concurrent
episodes and an episode can continue in another process.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from attrs import field, frozen

from rlcore.spi.arrays import Int32Array
from rlcore.spi.generator import FinishReason

Message: TypeAlias = Mapping[str, str]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}"""
Row: TypeAlias = Mapping[str, Any]
"""One record of a data set."""


@frozen(kw_only=True, eq=False)
class Observation:
    """What the policy reads next: messages, text or tokens, exactly one of them not None.

    Messages go through the tokenizer's chat template: after a turn, what the template adds to the whole conversation is
    appended, and what was sampled stays as it was. Text and tokens are appended as they are.
    """

    messages: Sequence[Message] | None = None
    text: str | None = None
    tokens: Int32Array | None = None
    """int32 [length]"""


@frozen(kw_only=True, eq=False)
class Turn:
    """One answer of the policy."""

    text: str
    """The answer decoded, without special tokens."""
    tokens: Int32Array
    """int32 [length], the stop token included; read-only."""
    finish_reason: FinishReason


@frozen(kw_only=True, eq=False)
class ResetResult:
    """The beginning of an episode."""

    observation: Observation
    """The prompt."""
    state: Any
    """Handed back to `step`; picklable, and never changed in place, since the samples of a group start from one reset."""


@frozen(kw_only=True, eq=False)
class StepResult:
    """The environment's answer to a turn."""

    reward: float
    """Added to the episode's; finite."""
    done: bool
    observation: Observation | None = None
    """What the policy reads next; None exactly where `done`."""
    state: Any = None
    success: bool = False
    """Whether the task is solved: what pass@1 counts, read from the last step."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Finite; averaged over all turns that report them, and logged as `environment/<name>`."""


class Environment(Protocol):
    """An environment backend, built as Class(EnvironmentContext, config)."""

    async def reset(self, row: Row, seed: int) -> ResetResult:
        """Begin an episode on one record of the data set."""

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """Answer one turn of the policy."""

    def rows(self, split: str) -> Sequence[Row] | None:
        """Records that the environment makes itself ("train", "evaluation", disjoint); None where it brings none."""

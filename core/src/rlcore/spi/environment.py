"""The interface of environments: an environment starts an episode from a task and answers each of the policy's turns.

Verifiable rewards are one-turn episodes. State is explicit, so that one environment object serves any number of concurrent
episodes and an episode can continue in another process.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Literal, Protocol, Self, TypeAlias, overload

from attrs import field, frozen

from rlcore.spi.arrays import Int32Array
from rlcore.spi.errors import DataError, FailureKind
from rlcore.spi.generator import FinishReason

Tool: TypeAlias = Mapping[str, Any]
"""{"type": "function", "function": {"name": text, "description": text, "parameters": a JSON schema of the arguments}}"""


@frozen(kw_only=True)
class ToolCall:
    """One call of a tool that the policy wrote, whether or not it could be read."""

    id: str
    """Names the call among those of its turn."""
    name: str
    """The tool's name, whether or not there is such a tool; empty where none could be read."""
    arguments: Mapping[str, Any] = field(factory=dict)
    """Parsed from JSON; empty where `error` is not None."""
    text: str
    """The call as the policy wrote it."""
    error: str | None = None
    """Why the call could not be read; None where it could."""


ParseToolCalls: TypeAlias = Callable[[str, Sequence[Tool]], tuple[str, Sequence[ToolCall]]]
"""(text of a turn with its special tokens, tools of the episode) -> (text without the calls, calls in order)."""


class ToolParser(Protocol):
    """Finds the calls of tools in a turn."""

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text without the calls, and the calls in order, those that could not be read among them. Never raises."""


Message: TypeAlias = Mapping[str, Any]
"""{"role": "system" | "user" | "assistant" | "tool", "content": text}, with "name" and "tool_call_id" of a tool's answer. Any
other field goes to the chat template, and is an error where that does not show it. In the prompt, content may be a list of
{"type": "text", "text": …} and, for models that read images, {"type": "image", "image": file}. The file is its bytes or its
path. If a prompt ends in an assistant's message, the policy continues that message."""
Row: TypeAlias = Mapping[str, Any]
"""One record of a data set."""


@frozen(kw_only=True, eq=False)
class Observation:
    """The policy's next input: messages, text or tokens, exactly one of them not None.

    Messages go through the tokenizer's chat template. After a turn, the template's new text is appended to the conversation,
    and sampled tokens stay unchanged. Text and tokens are appended as they are.
    """

    messages: Sequence[Message] | None = None
    text: str | None = None
    tokens: Int32Array | None = None
    """int32 [length]"""
    tools: Sequence[Tool] = ()
    """The tools that the policy may call from here on; only beside the messages of `reset`, and JSON throughout. The chat
    template shows them to the policy, whose turns are then searched for calls."""

    @classmethod
    def of_prompt(
        cls,
        prompt: Any,
        *,
        prompt_format: Literal["chat", "text"],
        system_prompt: str | None = None,
        tools: Sequence[Tool] | None = None,
    ) -> "Observation":
        """Make the observation of a row's prompt. Messages stay as they are. A text stays a text for "text"; else it becomes a
        user's message, behind `system_prompt` if there is one. `tools` are the row's; DataError if they come with a text."""
        if not isinstance(prompt, str):
            return cls(messages=prompt, tools=tools or ())
        if prompt_format == "text":
            if tools:
                raise DataError('found tools beside a prompt of plain text; expected messages, or prompt_format = "chat"')
            return cls(text=prompt)
        system: Sequence[Message] = () if system_prompt is None else ({"role": "system", "content": system_prompt},)
        return cls(messages=[*system, {"role": "user", "content": prompt}], tools=tools or ())


@frozen(kw_only=True, eq=False)
class Turn:
    """One answer of the policy."""

    text: str
    """The answer decoded, without special tokens."""
    tokens: Int32Array
    """int32 [length], the stop token included; read-only."""
    finish_reason: FinishReason
    content: str = ""
    """The text without the calls of tools: `text` itself where the episode has none."""
    tool_calls: Sequence[ToolCall] = ()
    """The calls of tools in it, in order, those that could not be read among them; none where the episode has no tools."""
    begins_in_thought: bool = False
    """True where the prompt ends in the mark that begins a thought, such as `<think>`."""


@frozen(kw_only=True, eq=False)
class ResetResult:
    """The beginning of an episode."""

    observation: Observation
    """The prompt."""
    state: Any
    """Handed back to `step`, and never changed in place, since the samples of a group start from one reset. A checkpoint keeps
    numbers, texts, bytes, dates, lists, tuples, sets, dicts, arrays, members of enumerations, and instances of attrs classes or
    dataclasses; other states begin again."""


@frozen(kw_only=True)
class EpisodeFailure:
    """The end of an episode other than by an answer of the policy that could be judged."""

    kind: FailureKind
    reason: str = ""
    """The cause in words; `rlcore failures` counts episodes by it."""
    masked: bool = False
    """Leave out of training a sample of the kind "policy" or "limit", whose reward counts otherwise. All other kinds are left
    out in any case, whatever the recipe does with errors."""

    @property
    def is_trained(self) -> bool:
        """Return whether the reward counts."""
        return self.kind in ("policy", "limit") and not self.masked


@frozen(kw_only=True, eq=False)
class StepResult:
    """The environment's answer to a turn."""

    reward: float
    """Added to the episode's; finite."""
    part_rewards: Mapping[int, float] = field(factory=dict)
    """Rewards of parts of the turn, for process supervision, by the end of a part in `Turn.text`, in characters. Finite. All
    are added to the episode's; `reward` is that of the turn's end. Algorithms that compare turns compare parts."""
    done: bool
    observation: Observation | None = None
    """The policy's next input; None exactly where `done`."""
    state: Any = None
    success: bool = False
    """True where the task is solved, which pass@1 counts, read from the last step."""
    reward_components: Mapping[str, float] = field(factory=dict)
    """The components of the reward, by name, for algorithms that compare each part by itself: finite; each is added to the
    episode's own. All others train on `reward`, whatever the sum of these is. Logged as `reward/<name>`."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Finite; averaged over all turns that report them, and logged as `environment/<name>`."""
    failure: EpisodeFailure | None = None
    """None where the episode goes on, and where it ended by the policy."""


@frozen(kw_only=True)
class SessionEndpoint:
    """One episode's OpenAI-compatible endpoint of the policy. Answers are recorded for training, unless `record` is false."""

    base_url: str
    """The address for clients, http://HOST:PORT/TOKEN/v1. Its requests are refused once the episode has ended."""
    api_key: str
    """The token, which http://HOST:PORT/v1 takes as a bearer token."""
    model: str
    """The name of the model, which each request has to have."""


@frozen(kw_only=True, eq=False)
class EpisodeResult:
    """An agent environment's result of a whole episode."""

    reward: float
    """Finite; that of everything that the policy said in the episode."""
    success: bool = False
    """True where the task is solved, which pass@1 counts."""
    reward_components: Mapping[str, float] = field(factory=dict)
    """The components of the reward, as those of StepResult."""
    metrics: Mapping[str, float] = field(factory=dict)
    """Finite; averaged over all episodes that report them, and logged as `environment/<name>`."""
    failure: EpisodeFailure | None = None
    """None where the episode ended by the policy."""


class AgentEnvironment(Protocol):
    """An environment backend whose episodes run by themselves, and ask the policy through OpenAI's API. Its provider declares
    the capability `agent`."""

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        """Run an episode on one record of the data set to its end. Where it is cancelled, it leaves nothing behind."""

    def rows(self, split: str) -> Sequence[Row] | None:
        """Records that the environment makes itself, as those of Environment."""


class Environment(Protocol):
    """An environment backend, built as Class(EnvironmentContext, config).

    One that starts threads or processes has a method `close()`, not async, which ends them; a later call may start others.
    """

    async def reset(self, row: Row, seed: int) -> ResetResult:
        """Begin an episode on one record of the data set."""

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """Answer one turn of the policy."""

    def rows(self, split: str) -> Sequence[Row] | None:
        """Records that the environment makes itself ("train", "evaluation", disjoint); None where it brings none."""


class LazyRows(Sequence[Row]):
    """LazyRows(num_rows, make): rows that make(0) to make(num_rows - 1) return, each time one is taken. They cost the memory of
    what they are made from."""

    def __init__(self, num_rows: int, make: Callable[[int], Row], level_of: Callable[[int], int | None] | None = None) -> None:
        """`make` is called with numbers from 0 to num_rows - 1; so is `level_of`, which tells the field `level` of a row
        without making it."""
        self.numbers = range(num_rows)
        """The numbers of these rows; those of a slice are among the whole sequence's."""
        self._make = make
        self.level_of = level_of
        """The function that returns the level of a row by its number; None where the row has to be made."""

    def name_of(self, index: int) -> str:
        """Return how errors call a row."""
        return f"row {index} (the first is 0)"

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> "Row | Self":
        numbers = self.numbers[index]
        if isinstance(numbers, int):
            return self._make(numbers)
        rows = copy(self)
        rows.numbers = numbers
        return rows

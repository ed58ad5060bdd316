"""Tokenizers and renderers: what a run asks of them, and the installed ones."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, Protocol, TypeAlias, cast

from attrs import frozen

from rlcore import spi
from rlcore.config.data import DatasetConfig, Split
from rlcore.config.model import ModelConfig
from rlcore.config.recipe import RolloutConfig
from rlcore.registry.run_parts import text_backend
from rlcore.run.data.examples import Examples
from rlcore.spi.arrays import Int32Array, Int64Array

History: TypeAlias = Literal["segment", "refuse", "keep_sampled"]
"""Handling of templates that would rewrite earlier messages."""
NextInput: TypeAlias = tuple[Int32Array, bool]
"""Tokens that an episode reads before its next turn, int32 [length]; True where they begin a segment: a context of its own."""
Observe: TypeAlias = Callable[[Sequence[spi.Row]], Sequence[spi.Observation]]
"""Returns the prompts that an environment makes of rows."""
EngineParser: TypeAlias = Callable[[str], spi.ParseToolCalls | None]
"""The generator's own parser of a name, None where it has none of it."""


@frozen(kw_only=True, eq=False)
class Prompts:
    """P prompts within the limit; all their tokens, 4 bytes each, take about the memory of their text."""

    tokens: spi.RaggedTokens
    """P prompts."""
    rows: Int64Array
    """int64 [P]: the row of the data set that each came from, ascending."""
    num_dropped: int
    """Rows left out since they are over the limit."""


class Tokenizers(Protocol):
    """Loads tokenizers."""

    def load_tokenizer(self, model: ModelConfig) -> spi.Tokenizer:
        """The tokenizer of a model directory or Hub name; ModelError where it has none."""

    def is_here(self, model: ModelConfig) -> bool:
        """Return whether the tokenizer is on this machine: in the model's directory, or fetched before. True too where there is
        neither and the path can be no name on the Hub."""


class Conversations(Protocol):
    """The conversations of episodes by their numbers, and the tokens that each reads after a turn."""

    def begin(self, episodes: Sequence[int], prompt: spi.Observation) -> None:
        """Begin episodes that share a prompt."""

    def __contains__(self, episode: int) -> bool:
        """Return whether an episode has begun that has not ended."""

    def state(self, episode: int) -> Any:
        """Return the state for `restore`: classes of attrs and plain values. An episode that could not begin has one too."""

    def restore(self, episode: int, state: Any) -> None:
        """Go on with a conversation that was left."""

    def end(self, episode: int) -> None:
        """Forget a conversation."""

    def add_turn(self, episode: int, text: str, last_token: int | None) -> None:
        """Add what the policy said in an episode: its text without special tokens, and its last token."""

    def read(
        self, episodes: Sequence[int], observations: Sequence[spi.Observation], most_tokens: Sequence[int] = ...
    ) -> list[NextInput | spi.DataError]:
        """The input that each of some episodes reads next, or the error where it cannot go on. ContractError for messages in an
        episode that did not begin with some. A text far beyond `most_tokens` is encoded in part."""


class Renderer(Protocol):
    """Reads rows of data sets, and renders them and chats to tokens."""

    def load_rows(
        self,
        config: DatasetConfig,
        split: Split,
        environment: spi.Environment | spi.AgentEnvironment | None,
        owner: str = ...,
        *,
        key: str | None = None,
        **form: Any,
    ) -> Sequence[spi.Row]:
        """The rows of a data set's section `key`, each checked when it is taken. DataError where there are none."""

    def given_rows(self, rows: Sequence[Any] | None, config: DatasetConfig, key: str, **form: Any) -> Sequence[spi.Row]:
        """The rows that a program passes, all checked. DataError where there are none."""

    def render_examples(
        self,
        rows: Sequence[spi.Row],
        tokenizer: spi.Tokenizer,
        config: DatasetConfig,
        rollout: RolloutConfig,
        *,
        key: str,
        source: Literal["rollouts", "demonstrations", "preferences", "labelled"],
    ) -> Examples:
        """The answers of rows to learn from. DataError names rows that have none."""

    def render_prompts(
        self,
        rows: Sequence[spi.Row],
        tokenizer: spi.Tokenizer,
        config: DatasetConfig,
        *,
        key: str,
        max_prompt_tokens: int,
        observe: Observe | None = None,
    ) -> Prompts:
        """The prompts of rows within the limit. DataError names a row without a prompt, or over the limit where that is an
        error."""

    def encode_prompts(self, prompts: Sequence[spi.Observation], tokenizer: spi.Tokenizer) -> list[Sequence[int]]:
        """Tokens of each prompt. DataError where the chat template leaves something out."""

    def prompt_images(self, messages: str | Sequence[spi.Message] | None) -> tuple[bytes, ...]:
        """The images of a prompt, in order."""

    def prompt_fault(self, value: object) -> str | None:
        """Why `value` is no prompt; None where it is one."""

    def reply_fault(self, messages: Sequence[spi.Message]) -> str | None:
        """Why messages that are a prompt are no reply to a turn; None where they are one."""

    def conversations(self, tokenizer: spi.Tokenizer, stop_token_ids: Sequence[int], history: History = ...) -> Conversations:
        """The conversations of episodes, by the episode's number."""

    def tool_parser(self, name: str, chat_template: str | None, engine: EngineParser | None = None) -> spi.ToolParser | None:
        """Return the parser that `rollout.tool_parser` names.

        None for "auto" where the chat template shows no form that is known. ConfigError for an unknown name.
        """

    def tool_forms(self) -> Sequence[str]:
        """Names of the forms of calls that it reads without the generator."""


@cache
def renderer() -> Renderer:
    """Return the installed renderer. PluginError names what installs one."""
    return cast("Renderer", text_backend("renderer"))


@cache
def tokenizers() -> Tokenizers:
    """Return what loads tokenizers. PluginError names what installs it."""
    return cast("Tokenizers", text_backend("tokenizer"))


def row_name(rows: Sequence[spi.Row], number: int) -> str:
    """Return the name of a row in errors: its number, and its line in a file that has lines."""
    return rows.name_of(number) if isinstance(rows, spi.LazyRows) else f"row {number} (the first is 0)"

"""Interface between the server and a generator: single sample requests, each independent of the others."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen

from rlcore.spi import FinishReason, SamplingMask, SamplingParams
from rlcore.spi.arrays import Float32Array, Int32Array


@frozen(kw_only=True, eq=False)
class SampleRequest:
    """One sample that is wanted."""

    prompt: Int32Array
    """int32 [length], at least one token."""
    seed: int
    """Non-negative and below 2⁶³."""
    max_tokens: int
    """Most tokens to generate, at least 1."""
    sampling: SamplingParams
    conversation: int = -1
    """The session that it belongs to, by its number; -1 where its prompts have nothing in common."""
    goes_on: bool = False
    """Whether the session has asked before."""


@frozen(kw_only=True, eq=False)
class Sample:
    """One sample."""

    text: str
    """Its tokens decoded, without special tokens."""
    tokens: Int32Array
    """int32 [T], the stop token included."""
    logprobs: Float32Array
    """float32 [T]: of each token under the distribution sampled from."""
    weight_versions: Int32Array
    """int32 [T]: version of the weights that sampled each token."""
    finish_reason: FinishReason
    sampling_mask: SamplingMask | None = None
    """What each of the T tokens was chosen among, where the generator was asked."""


class Sampler(Protocol):
    """A generator as the server sees it."""

    async def sample(self, request: SampleRequest) -> Sample:
        """Generate one sample. It runs on the server's event loop and joins whatever else is generated; cancelling it gives
        the sample up. RequestError with status 429 or 503 where no sample can be had now, or none any more."""


class ChatTokenizer(Protocol):
    """What the server asks of a tokenizer."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""

    @property
    def prompt_prefix(self) -> tuple[int, ...]:
        """Tokens that a prompt given as plain text begins with."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of exactly this text, no special tokens added."""

    def encode_behind(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text as it stands behind another one."""

    def decode(self, tokens: Sequence[int] | Int32Array) -> str:
        """Return the text of tokens, without special tokens."""

    def show(self, tokens: Sequence[int] | Int32Array) -> str:
        """Return the text of tokens, special tokens included."""

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatTokenizer":
        """Return the tokenizer with further variables for its chat template. DataError where that reads none of a name."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the messages through the chat template, up to where the assistant's answer begins. DataError where the
        template refuses them."""

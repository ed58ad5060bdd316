"""Sessions: the policy behind OpenAI's API for one episode each, and the sequences that the episode trains on.

A run whose environment declares `agent` asks the installed session server for an endpoint each episode. The server turns
requests into sample requests, which the collector has generated, and returns what was sampled as sequences of tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from attrs import frozen

from rlcore.registry.run_parts import call_function
from rlcore.spi import ChatTokenizer, FinishReason, ParseToolCalls, SamplingMask, SamplingParams, SessionEndpoint
from rlcore.spi.arrays import BoolArray, Float32Array, Int32Array


@frozen(kw_only=True, eq=False)
class SampleRequest:
    """One sample that is wanted."""

    prompt: Int32Array
    """int32 [length], at least one token. Requests of one array share a prompt."""
    seed: int
    """Non-negative and below 2⁶³."""
    max_tokens: int
    """Most tokens to generate, at least 1."""
    sampling: SamplingParams
    conversation: int = -1
    """`Session.number` of the session that it belongs to; -1 where its prompts have nothing in common."""
    goes_on: bool = False
    """True where the session has asked before."""
    on_tokens: Callable[[int, Sequence[int], Sequence[Mapping[int, float]]], None] | None = None
    """TokenReader.on_tokens of the sample, where the generator has the capability `token_streaming`."""
    num_logprobs: int | None = None
    """TokenReader.num_logprobs of it."""
    on_prompt: Callable[[Sequence[Mapping[int, float]]], None] | None = None
    """TokenReader.on_prompt of it."""


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
    """The tokens that each of the T tokens was chosen among, where the generator was asked."""


class Sampler(Protocol):
    """A generator as a session server sees it."""

    async def sample(self, request: SampleRequest) -> Sample | None:
        """Generate one sample, on any event loop; it joins whatever else is generated. Cancelling it gives the sample up. None
        where no sample comes any more: generation has ended, or the session is finished."""


@frozen(kw_only=True, eq=False)
class SessionContext:
    """The arguments of a session server."""

    model_name: str
    """The name of the model in requests."""
    tokenizer: ChatTokenizer
    sampler: Sampler
    sampling: SamplingParams
    """The distribution of all samples, and their stop tokens."""
    max_tokens: int
    """Most tokens of an answer."""
    max_sequence_length: int
    """Most tokens of a prompt and its answer."""
    capabilities: frozenset[str] = frozenset()
    """The generator's capabilities, of rlcore.spi.capabilities."""
    vocab_size: int | None = None
    """Tokens that the model has; None where that is not known."""
    history: Literal["segment", "refuse"] = "segment"
    """rollout.history: handling of a chat whose template rewrites what there was, in a new segment or by a refusal."""
    parse_tool_calls: ParseToolCalls | None = None
    """Reads the calls of tools; None where their form is not known, and tools are refused."""
    tool_form: str = ""
    """The name of the form that `parse_tool_calls` reads."""
    shows_tools: bool = True
    """False where the chat template reads no tools, so that the conversation's text describes them."""
    keeps_kept: bool = False
    """True where samples say what their tokens were chosen among, or where nothing trains on them."""
    note: Callable[[str], None]
    """Tells the user something, from any thread."""


@frozen(kw_only=True, eq=False)
class Segment:
    """One sequence of a session: T tokens from the first prompt to the last answer."""

    tokens: Int32Array
    """int32 [T]"""
    loss_mask: BoolArray
    """bool [T]: True where the policy sampled the token, in the first of the session's segments that holds it."""
    logprobs: Float32Array
    """float32 [T]: of each token under the distribution sampled from; 0.0 where the policy only read it."""
    weight_versions: Int32Array
    """int32 [T]: version of the weights that sampled each token; -1 where the policy only read it."""
    finish_reason: FinishReason
    """Why the last answer ended."""
    text: str
    """The text of all answers, one after another."""
    sampling_mask: SamplingMask
    """The tokens that each token was chosen among, where the generator was asked; empty rows elsewhere."""


class Session(Protocol):
    """One episode's endpoint."""

    @property
    def number(self) -> int:
        """Its own among all sessions of the process."""

    @property
    def endpoint(self) -> SessionEndpoint:
        """Return the endpoint that the environment gets."""

    @property
    def num_samples(self) -> int:
        """Samples that were asked for so far."""

    @property
    def num_unanswered(self) -> int:
        """Samples among them without an answer: their clients hung up, or they are under way."""

    def finish(self) -> Sequence[Segment]:
        """Refuse its requests from now on, those under way too, and return what was recorded, in order. From any thread."""


class SessionServer(Protocol):
    """Serves sessions."""

    def open(self) -> None:
        """Begin to listen."""

    def begin(self, seed: tuple[int, ...]) -> Session:
        """Return a session, whose samples' seeds follow from this key of numpy's SeedSequence and the order of its requests.
        From any thread, between `open` and `close`."""

    def close(self) -> None:
        """End the server, and what answers requests. `open` may be called again."""


def session_server(context: SessionContext) -> SessionServer:
    """Build the installed session server. PluginError where there is none, or it is not usable."""
    server: SessionServer = call_function("session_server", context)
    return server

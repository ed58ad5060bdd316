"""The generator's hooks and their records."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import ClassVar, Protocol

import numpy as np
from attrs import field, frozen

from rlcore.spi.arrays import Float32Array, Int16Array, Int32Array, Int64Array, UInt8Array, check_array, check_offsets
from rlcore.spi.batch import Images, PackedTokens, RaggedTokens, SamplingMask, check_images
from rlcore.spi.errors import ContractError
from rlcore.spi.lifecycle import (
    CloseRequest,
    LoadStateRequest,
    LoadStateResult,
    SaveStateRequest,
    SaveStateResult,
    SetResidencyRequest,
    SetResidencyResult,
    hookspec,
)
from rlcore.spi.weights import Delta, WeightExport


class FinishReason(IntEnum):
    """Why a sample ended. Only STOP is a finished answer."""

    STOP = 0
    """A stop token or stop string; its tokens are the sample's last."""
    LENGTH = 1
    """max_tokens or the sequence limit was reached."""
    ABORTED = 2
    """Cut by the engine or the driver; the tokens so far are valid."""


@frozen(kw_only=True)
class SamplingParams:
    """The distribution sampled from, and when to stop."""

    temperature: float = 1.0
    """Logits are divided by it; 0.0 takes the most probable token."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all. Applied before top_p."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches it; 1.0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of these ends a sample and is its last token."""
    stop_strings: tuple[str, ...] = ()
    """A sample ends with the token that completes one of these in the decoded text of its generated tokens. The prompt takes no
    part: a string that begins in it does not end a sample."""
    json_schema: str | None = None
    """A JSON Schema, an object, that the sample's text fulfils: each token is chosen among those that the schema allows. None
    for any text. Needs the capability `structured_output`, and the tokenizer's own end of a text among the stop tokens."""


@frozen(kw_only=True, eq=False)
class TokenReader:
    """Reads one sample's tokens as the generator samples them, and may end the sample."""

    on_tokens: Callable[[int, Sequence[int], Sequence[Mapping[int, float]]], None] | None = None
    """Called from any thread, in order, with the number of earlier tokens, the new ones, and of each the log-probabilities, by
    token, of itself and of the most probable ones; an empty list without `num_logprobs`. It is quick and never raises."""
    num_logprobs: int | None = None
    """Most probable tokens to report beside each one; None for no log-probabilities."""
    on_prompt: Callable[[Sequence[Mapping[int, float]]], None] | None = None
    """Called once, before any token comes, with the prompt's tokens from the second on, each as in `on_tokens` but of the whole
    distribution at temperature 1. Needs `num_logprobs`, and the capability `prompt_logprobs`."""
    cancelled: Future[None] = field(factory=Future)
    """Done once nobody needs the sample: it ends soon, as ABORTED."""


@frozen(kw_only=True, eq=False)
class GenerateRequest:
    """S = P · num_samples samples; sample s of prompt p is number p · num_samples + s."""

    prompts: RaggedTokens
    """P prompts."""
    num_samples: int
    """Samples per prompt."""
    seeds: Int64Array
    """int64 [S], non-negative: each sample's own."""
    max_tokens: Int32Array
    """int32 [S], at least 1: most tokens to generate."""
    sampling: SamplingParams
    weight_version: int
    """The version that the generator must hold when generation begins."""
    on_finished: "Callable[[int, GenerateResult], None] | None" = None
    """Called with a sample's number and a result of that one sample as soon as it ends, once a sample, from any thread. Needs
    the capability `streaming`."""
    routed_experts: bool = False
    """True where the generator reports the experts that each token was sent to. Needs the capability `routed_experts`, and a
    generator built with GeneratorContext.routed_experts."""
    conversations: Int64Array | None = None
    """int64 [S]: the conversation that each sample belongs to, -1 for none: a later prompt of the same number begins with this
    one and what was said to it. It changes no sample. A generator of several engines may give those of one number to one of
    them, which has their beginning in its cache. None where no sample belongs to any."""
    sampling_mask: bool = False
    """True where the generator reports the tokens that each token was chosen among. Needs the capability `sampling_mask`."""
    images: Images | None = None
    """The images that each of the P prompts reads; None where there are none. Needs the capability `images`."""
    adapter: str = ""
    """The adapter that samples, of those that refits have brought; `weight_version` is its version."""
    readers: Sequence[TokenReader | None] | None = None
    """[S]: the reader of each sample, if it has one. Needs the capability `token_streaming`."""

    def __attrs_post_init__(self) -> None:
        num_samples = self.prompts.num_sequences * self.num_samples
        check_array("seeds", self.seeds, np.int64, num_samples)
        check_array("max_tokens", self.max_tokens, np.int32, num_samples)
        if num_samples and (self.max_tokens.min() < 1 or self.seeds.min() < 0):
            raise ContractError("max_tokens must be at least 1 and seeds non-negative")
        if self.conversations is not None:
            check_array("conversations", self.conversations, np.int64, num_samples)
        if self.images is not None:
            check_images(self.images, self.prompts.num_sequences)
        if self.readers is not None and len(self.readers) != num_samples:
            raise ContractError(f"readers: found {len(self.readers)}; expected one for each of {num_samples} samples")


@frozen(kw_only=True, eq=False)
class RoutedExperts:
    """The experts of the tokens of S samples: rows for all tokens of a sample's prompt, then for all of its response."""

    experts: Int16Array
    """int16 [R, L, K]: the K experts of each of R tokens, in any order, in each of all L layers of the model; -1 in layers
    without experts, and at tokens of which they are not known, such as the last of a sample, which no layer has seen."""
    offsets: Int64Array
    """int64 [S+1]: sample s is experts[offsets[s]:offsets[s+1]]."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.experts, np.ndarray) or self.experts.ndim != 3 or self.experts.dtype != np.int16:
            found = getattr(self.experts, "dtype", type(self.experts).__name__)
            raise ContractError(f"experts: found {found} {list(np.shape(self.experts))}; expected int16 [R, L, K]")
        check_offsets("experts' offsets", self.offsets, len(self.experts), allow_empty=False)


@frozen(kw_only=True, eq=False)
class GenerateResult(PackedTokens):
    """The responses of S samples alone, without their prompts; a sample has at least one token unless it was aborted."""

    _allows_empty: ClassVar[bool] = True
    logprobs: Float32Array
    """float32 [T]: of each token under the distribution actually sampled from, after temperature, top-k and top-p;
    at temperature 0, under the untempered, untruncated distribution."""
    weight_versions: Int32Array
    """int32 [T]: version of the weights that sampled the token; never falls within a sample."""
    finish_reasons: UInt8Array
    """uint8 [S]: FinishReason."""
    routed_experts: RoutedExperts | None = None
    """None unless the request asks for routed experts."""
    sampling_mask: SamplingMask | None = None
    """A row for each of the T tokens, empty at temperature 0 and where nothing is left out; None unless the request asks."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_array("logprobs", self.logprobs, np.float32, len(self.tokens))
        check_array("weight_versions", self.weight_versions, np.int32, len(self.tokens))
        check_array("finish_reasons", self.finish_reasons, np.uint8, len(self.offsets) - 1)
        if self.sampling_mask is not None:
            self.sampling_mask.check_length(len(self.tokens))


class SampleFeed(Protocol):
    """The queue of a stream, which gives requests and takes samples. Samples are numbered through the stream, from 0 on, in the
    order in which their requests were taken."""

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """Return the requests that came since the last call, oldest first. With `wait`, block until there is one. Return None
        once the stream is to end: the generator then delivers unfinished samples as ABORTED, with their tokens, and returns.
        The requests' `on_finished` is None, and `weight_version` is the oldest version that they may be generated with. One
        thread calls it at a time."""

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        """Hand out finished samples of one request, int64 [M], with a result of these M samples in the same order. Deliver each
        sample once, soon after it ended, from any thread. It is quick and never raises."""

    def end(self) -> None:
        """End the stream: `take` returns None from now on. Called after an invalid delivery."""


@frozen(kw_only=True, eq=False)
class StreamRequest:
    """Generate what a feed brings until it ends. Requests join while others run."""

    feed: SampleFeed
    weight_version: int
    """The version that the generator must hold when the stream begins; of several adapters, that of any."""


@frozen(kw_only=True)
class StreamResult:
    """The stream has ended, and every sample of it was delivered."""


@frozen(kw_only=True, eq=False)
class RefitRequest:
    """Take over the trainer's weights."""

    weight_version: int
    """The version that the generator holds afterwards."""
    channel: str
    """How the weights travel: the channel that the generator was built for."""
    weights: WeightExport
    may_alias: bool
    """True where the generator may keep a persistent export's tensors themselves instead of a copy. Then the next
    train_step changes what it holds, and it must be refitted before it generates again."""
    delta: Delta = "off"
    """The device on which both ends of the channel keep the weights of the refit before, so that unchanged values are left out;
    "off" where all travel. The digests are those of all values. Needs the capability `delta_refit`, and a channel with
    `delta`."""
    waits: bool = True
    """True where the refit waits for an engine that is being started anew; else a generator may answer `is_starting` at once,
    and is left out until a later refit."""
    adapter: str = ""
    """The adapter that the export brings, alone or with the model's weights; `weight_version` is its version. Others stay as
    they are where it comes alone. The model's weights make the generator forget all others. Names besides "" need the
    capability `many_adapters`."""
    drops: tuple[str, ...] = ()
    """Other adapters, which the generator forgets before this one comes. Their unfinished samples end as ABORTED. Needs the
    capability `many_adapters`."""


@frozen(kw_only=True)
class DraftCounts:
    """The counts of speculative decoding (arXiv:2211.17192): draft tokens, and how many the model accepted."""

    num_drafts: int = 0
    """Guesses, each of one or several tokens of one sample in one step."""
    num_draft_tokens: int = 0
    """Tokens in them."""
    num_accepted_tokens: int = 0
    """Guessed tokens that became part of a sample; each guess brings one token more, which the model samples itself."""

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            num_drafts=self.num_drafts + other.num_drafts,
            num_draft_tokens=self.num_draft_tokens + other.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + other.num_accepted_tokens,
        )


@frozen(kw_only=True)
class RefitResult:
    """The generator's acknowledgement; the core compares it with the export before the version counts."""

    weight_version: int
    digests: Mapping[str, int] = field(factory=dict)
    """`tensor_digest` of what the generator holds (or, where its engine repacks, received), by Hugging Face name."""
    drafts: DraftCounts | None = None
    """Counts of draft tokens since the refit before; None where it drafts none."""
    is_starting: bool = False
    """True where an engine is still being started anew, which the request does not wait for: no weights are held, and nothing
    was read of the export."""
    shard_digest: int | None = None
    """In place of `digests` where the export was sharded: the sum mod 2^64 of the digests of all that its ranks took."""
    sent_bytes: int | None = None
    """Bytes that its end of the channel has sent or written; None where it does not count them, as where the trainer sends."""


OPTIONAL_HOOKS = ("stream", "save_state", "load_state")
"""Hooks of a generator that a backend may leave out."""


class GeneratorSpec(Protocol):
    """The hooks of a generator. A backend implements them with `rlcore.spi.hookimpl`, in exactly these signatures. It may leave
    out stream if it lacks the capability `continuous`. It may leave out save_state and load_state if the requests' seeds
    determine its samples. The bodies here are what then happens.

    A fresh generator holds no valid weights: the core refits it before the first generate.
    """

    @hookspec(firstresult=True)
    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample responses."""

    @hookspec(firstresult=True)
    def stream(self, request: StreamRequest) -> StreamResult:  # noqa: ARG002
        """Generate what a feed brings, until it ends. Needs the capability `continuous`."""
        raise ContractError("stream: found a generator that does not implement it; expected the capability `continuous`")

    @hookspec(firstresult=True)
    def refit(self, request: RefitRequest) -> RefitResult:
        """Take over weights and drop every cache that depends on the old ones."""

    @hookspec(firstresult=True)
    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move weights between device and host; free or restore the KV cache. An engine that is being started is not waited
        for: it goes there once it has started. WorkerError where one has died, which holds nothing on the device then; it goes
        there once it has been started anew."""

    @hookspec(firstresult=True)
    def save_state(self, request: SaveStateRequest) -> SaveStateResult:  # noqa: ARG002
        """Write what the seeds in the requests do not determine."""
        return SaveStateResult(files=())

    @hookspec(firstresult=True)
    def load_state(self, request: LoadStateRequest) -> LoadStateResult:  # noqa: ARG002
        """Restore what save_state wrote; returns the version held, -1 where no weights count."""
        return LoadStateResult(weight_version=-1)

    @hookspec(firstresult=True)
    def close(self, request: CloseRequest) -> None:
        """Free everything."""

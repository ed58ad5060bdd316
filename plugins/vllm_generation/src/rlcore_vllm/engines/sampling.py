"""From the request's samples to vLLM's requests, and from its finish reasons back."""

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, TypeAlias

import numpy as np
from attrs import frozen

from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, Images, RaggedTokens, RlcoreError, SamplingParams
from rlcore.spi.arrays import Int64Array
from rlcore_torchkit.generation import FinishedSample, join_samples, splitmix64
from rlcore_vllm.engines.grammars import structured_outputs

SMALLEST_TEMPERATURE = 1e-5
"""vLLM takes the most probable token below it."""
TOKENS_ALONE = -1
"""The number of log-probabilities where a reader wants tokens without any."""


@frozen(kw_only=True, eq=False)
class Samples:
    """A request to one engine: S samples, each with its prompt. Travels between processes."""

    prompts: RaggedTokens
    """P prompts."""
    prompt_of: Int64Array
    """int64 [S]: index of each sample's prompt; samples of one prompt are adjacent."""
    numbers: Int64Array
    """int64 [S]: each sample's number in the whole request."""
    seeds: Int64Array
    """int64 [S], non-negative."""
    limits: Int64Array
    """int64 [S]: tokens at which a sample is cut, by max_tokens and the longest sequence."""
    sampling: SamplingParams
    routed_experts: bool = False
    """True where to report the experts of each token."""
    sampling_mask: bool = False
    """True where to report what each token was sampled among."""
    images: Images | None = None
    """The images that each of the P prompts reads; None where there are none."""
    adapter: int = 0
    """The engine's number of the adapter that samples, 0 where there are none."""
    read: Sequence[int | None] | None = None
    """[S]: most probable tokens to report beside each sampled one, TOKENS_ALONE without log-probabilities, None for a sample
    that nothing reads while it is sampled; None where nothing reads any."""
    reads_prompt: Sequence[bool] | None = None
    """[S]: True where a reader gets the prompt's log-probabilities; None where none does."""


@frozen(kw_only=True, eq=False)
class SampledTokens:
    """Tokens of one sample, for its reader. Travels between processes."""

    number: int
    """The sample's number in the whole request."""
    first: int
    """Earlier tokens of the sample."""
    tokens: Sequence[int]
    logprobs: Sequence[Mapping[int, float]] = ()
    """Log-probabilities by token, at each of the tokens; empty where the reader wants none."""
    is_prompt: bool = False
    """True where `logprobs` are those of the prompt's tokens from the second on, and there are no tokens."""


OnTokens: TypeAlias = Callable[[SampledTokens], None]


@frozen(kw_only=True, eq=False)
class Event:
    """Samples of a call that ended, or its end. Travels between processes."""

    number: int
    """The call's."""
    finished: Sequence[FinishedSample] = ()
    sampled: SampledTokens | None = None
    is_last: bool = False
    error: RlcoreError | None = None
    """The error that the call failed with."""


def engine_sampling(
    sampling: SamplingParams, seed: int, limit: int, *, logprobs: int | None, prompt_logprobs: int | None = None
) -> Any:
    """vLLM's SamplingParams of one sample; `logprobs` asks for those of sampled tokens and of so many most probable ones, and
    `prompt_logprobs` for those of the prompt."""
    from vllm import SamplingParams as EngineSampling

    params = EngineSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=seed,
        max_tokens=limit,
        stop=list(sampling.stop_strings),
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=None if sampling.json_schema is None else structured_outputs(sampling.json_schema),
    )
    # Without this, what lies below vLLM's own least temperature of 0.01 would be sampled at that.
    params.temperature = sampling.temperature
    return params


def logprob_rows(tokens: Any, logprobs: Any, width: int) -> list[dict[int, float]]:
    """Return log-probabilities by token of each row of vLLM's arrays [rows, at least width], without those that are -inf."""
    pairs = zip(tokens[:, :width].tolist(), logprobs[:, :width].tolist(), strict=True)
    return [{token: value for token, value in zip(*row, strict=True) if value != -inf} for row in pairs]


def joined(samples: Sequence[FinishedSample], request: GenerateRequest) -> GenerateResult:
    """The samples of a request one after another, with what it asks to know of them."""
    return join_samples(samples, routed_experts=request.routed_experts, sampling_mask=request.sampling_mask)


def engine_seeds(seeds: Int64Array) -> list[int]:
    """One seed of 32 bits each, made of all bits of the request's: torch's generator on the CPU drops the upper half."""
    return [int(seed) for seed in splitmix64(seeds.astype(np.uint64)) >> np.uint64(32)]


def finish_reason(reason: str, num_tokens: int, limit: int) -> FinishReason:
    """vLLM's finish reason as ours; a sample that was cut before its whole limit is never called finished or full."""
    if reason == "stop":
        return FinishReason.STOP
    if reason == "length" and num_tokens == limit:
        return FinishReason.LENGTH
    return FinishReason.ABORTED

"""Sampling sessions, and the samples that clients ask of them."""

import asyncio
import math
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from attrs import define, frozen

from rlcore.spi import FinishReason
from rlcore.spi.arrays import Float32Array, Int32Array
from rlcore_tinker.adapter_pool import AdapterPool
from rlcore_tinker.backend import SampledCompletion
from rlcore_tinker.errors import RequestError, as_request_error
from rlcore_tinker.fields import Fields, tokens_of
from rlcore_tinker.promises import Promise, Promises, Result
from rlcore_tinker.training_data import Limits
from rlcore_tinker.weights import NamedWeights, Weights
from rlcore_tinker.wire import CLASSES

CLONE = 1_000_000_000
"""Numbers of requests that one clone of a sampling client has."""
MAX_SAMPLES = 4096
NOT_SERVED = {
    "topk_prompt_logprobs": 0,
    "topk_sample_logprobs": 0,
    "prompt_alt_tokens_k": 0,
    "target_prompt_logprobs": None,
    "record_stability_info": None,
}
"""Fields of a sample request that only have this value here."""


@define(kw_only=True, eq=False)
class SamplingSession:
    """One sampling client of a client's session."""

    sampler_id: str
    session_id: str
    base_model: str
    weights: NamedWeights | None
    """None for whatever the generator holds: the protocol's kind "inflight"."""
    model_path: str | None = None
    num_clones: int = 0


@frozen(kw_only=True)
class SampleParams:
    """The settings of one sample request."""

    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...] | None
    """Tokens that end a sample; None for the model's own."""
    seed: int | None
    prompt_logprobs: int | None
    """The number of prompt tokens, counted from the end, of which log-probabilities are asked: 0 of a single token, the first.
    None where the reply has none."""

    @property
    def only_scores(self) -> bool:
        """Return whether the client's compute_logprobs may have asked: then nobody reads the token that is sampled."""
        return self.prompt_logprobs is not None and self.num_samples == 1 and self.max_tokens == 1


def read_sample_request(body: Any, limits: Limits) -> SampleParams:
    """Read everything but the sampling session's id. RequestError with all problems."""
    fields = Fields(body, "asample")
    fields.ignored("sampling_session_id", "seq_id", "base_model", "model_path")
    prompt = Fields(fields.mapping("prompt"), "prompt")
    tokens = tuple(tokens_of(prompt.items("chunks"), "prompt"))
    prompt.done()
    params = Fields(fields.mapping("sampling_params"), "sampling_params")
    for name, only in NOT_SERVED.items():
        value = fields.any(name, only)
        if value not in (only, False):
            fields.problem(name, value, "no such field: this server does not serve it")
    num_samples = fields.integer("num_samples", 1, least=1, below=MAX_SAMPLES + 1)
    wants_prompt = bool(fields.flag("prompt_logprobs", None))
    last = fields.integer("prompt_logprobs_last_n", None, least=1, below=max(len(tokens), 2))
    if last is not None and not wants_prompt:
        fields.problem("prompt_logprobs_last_n", last, "prompt_logprobs with it")
    room = limits.max_sequence_length - len(tokens)
    top = math.inf if limits.vocab_size is None else limits.vocab_size
    wrong = [token for token in tokens if not 0 <= token < top]
    if not tokens or room < 1 or wrong:
        found = f"the token {wrong[0]}" if wrong else f"{len(tokens)} tokens"
        expected = f"1 to {limits.max_sequence_length - 1} tokens, of ids from 0 to below {top}"
        fields.problem("prompt", found, f"{expected}: the model reads {limits.max_sequence_length} with the answer")
    asked = params.integer("max_tokens", None, least=1)
    stop, stop_ids = _stops(params)
    temperature = params.number("temperature", 1.0, least=0, below=1000)
    top_k, top_p = params.integer("top_k", -1, least=-1, below=2**31), params.number("top_p", 1.0)
    if not 0 < top_p <= 1:
        params.problem("top_p", top_p, "a number above 0 and at most 1")
    seed = params.integer("seed", None, least=0, below=2**63)
    if top_k == 0:
        params.problem("top_k", 0, "-1 for all tokens, or a number of tokens")
    params.done()
    fields.done()
    return SampleParams(
        prompt=tokens,
        num_samples=num_samples,
        max_tokens=max(min(asked or room, room), 1),
        temperature=temperature,
        top_k=max(top_k, 0),
        top_p=top_p,
        stop=stop,
        stop_token_ids=stop_ids,
        seed=seed,
        prompt_logprobs=(last or len(tokens) - 1) if wants_prompt else None,
    )


def _stops(params: Fields) -> tuple[tuple[str, ...], tuple[int, ...] | None]:
    """The texts and tokens that end a sample: a text, texts, or token ids; an empty list is no stop at all."""
    stop = params.any("stop")
    stops = [stop] if isinstance(stop, str) else stop
    if stops is None:
        return (), None
    if isinstance(stops, list) and all(isinstance(one, str) and one for one in stops) and stops:
        return tuple(stops), None
    if isinstance(stops, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31 for one in stops
    ):
        return (), tuple(stops)
    params.problem("stop", stop, "a text, a list of texts, or a list of token ids (int32)")
    return (), None


class Samplers:
    """The sampling sessions of all clients."""

    def __init__(
        self, weights: Weights | AdapterPool, promises: Promises, limits: Limits, on_error: Callable[[BaseException], object]
    ) -> None:
        """`on_error` is called with each error that a sample request ended with."""
        self._weights, self._promises, self._limits, self._on_error = weights, promises, limits, on_error
        self._samplers: dict[str, SamplingSession] = {}
        self._running: dict[str, asyncio.Task[None]] = {}

    def add(self, sampler: SamplingSession) -> SamplingSession:
        """Add a sampling session."""
        self._samplers[sampler.sampler_id] = sampler
        return sampler

    def find(self, sampler_id: str) -> SamplingSession:
        """Return a sampling session. RequestError where there is none."""
        if sampler_id not in self._samplers:
            message = f"sampling_session_id: found {sampler_id!r:.100}; expected one of create_sampling_session"
            raise RequestError(message, status=404)
        return self._samplers[sampler_id]

    def submit(self, sampler: SamplingSession, seq_id: int, body: Any) -> tuple[Promise, list[str]]:
        """Return the future of a sample request, and an id for each of its sequences. A request that comes twice runs once."""
        request_id = f"{sampler.sampler_id}:{seq_id}"
        promise, is_new = self._promises.make(request_id, (sampler.sampler_id, seq_id // CLONE))
        if is_new:
            task = asyncio.create_task(self._answer(promise, sampler, body))
            self._running[request_id] = task
            task.add_done_callback(lambda _: self._running.pop(request_id, None))
        count = body.get("num_samples", 1) if isinstance(body, dict) else 1
        number = count if isinstance(count, int) and 0 < count <= MAX_SAMPLES else 1
        return promise, [f"{request_id}:{index}" for index in range(number)]

    def cancel(self, request_id: str) -> None:
        """Drop a sample request, which nobody waits for. Samples that are drawn already run to their end."""
        if task := self._running.get(request_id):
            task.cancel()

    async def _answer(self, promise: Promise, sampler: SamplingSession, body: Any) -> None:
        outcome: Result | RequestError
        try:
            outcome = await self._sampled(sampler, read_sample_request(body, self._limits))
        except asyncio.CancelledError:
            outcome = RequestError("the request was cancelled by its client", status=499)
        except Exception as error:
            self._on_error(error)
            outcome = as_request_error(error)
        await self._promises.end(promise, outcome)

    async def _sampled(self, sampler: SamplingSession, params: SampleParams) -> Result:
        prompt, wanted = list(params.prompt), sampler.weights
        logprobs: Float32Array | None = None
        if params.prompt_logprobs is not None:
            if wanted is None:
                raise RequestError(
                    "prompt_logprobs: found a request to an inflight sampler; expected one to a snapshot, whose weights stay"
                )
            (logprobs,) = await self._weights.logprobs(wanted, [prompt]) if len(prompt) > 1 else (np.zeros(1, np.float32),)
            if params.only_scores and not self._weights.generates(wanted):
                return Result.proto(_response([_Nothing()], params, logprobs))
        async with self._weights.sampling(wanted) as session:
            (samples,) = await session.asynchronous.sample(
                [prompt],
                num_samples=params.num_samples,
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                stop=params.stop,
                stop_token_ids=params.stop_token_ids,
                seed=params.seed,
                adapter=self._weights.adapter_of(wanted),
            )
        return Result.proto(_response(list(samples), params, logprobs))


@frozen(kw_only=True, eq=False)
class _Nothing:
    """A sample of no tokens, which stands in a reply that only has log-probabilities of the prompt."""

    tokens: Int32Array = np.zeros(0, np.int32)
    logprobs: Float32Array = np.zeros(0, np.float32)
    finish_reason: FinishReason = FinishReason.LENGTH


def new_sampler_id(session_id: str) -> str:
    """Return an id for a sampling session."""
    return f"{session_id}:sample:{uuid.uuid4().hex[:12]}"


def _response(samples: list[SampledCompletion], params: SampleParams, logprobs: Float32Array | None) -> Any:
    """The protocol's SampleResponse. Prompt tokens of which no log-probability was asked have NaN."""
    message = CLASSES["SampleResponse"]()
    for sample in samples:
        message.sequences.add(
            stop_reason=int(sample.finish_reason is FinishReason.LENGTH),
            tokens=sample.tokens.astype(np.int32).tobytes(),
            logprobs=sample.logprobs.astype(np.float32).tobytes(),
        )
    if logprobs is not None and params.prompt_logprobs is not None:
        shown = logprobs.astype(np.float32)
        shown[: max(len(shown) - params.prompt_logprobs, 1)] = np.nan
        message.prompt_logprobs = shown.tobytes()
    return message

"""The generator: hooks on top of the endpoints."""

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np

from rlcore import spi
from rlcore_openai.check import SECTION
from rlcore_openai.config import OpenAIConfig
from rlcore_openai.endpoints import Endpoints
from rlcore_openai.samples import CompletionRequest, Sample, result_of, wanted_of
from rlcore_openai.tokenizer import decoder_of, vocab_size_of


class OpenAIBackend:
    """Asks endpoints for samples of the weights that they have, which are version 0."""

    def __init__(self, context: spi.GeneratorContext, config: OpenAIConfig) -> None:
        self._max_sequence_length = context.max_sequence_length
        self._endpoints = Endpoints(
            config, context.max_sequence_length, decoder_of(context.model), vocab_size_of(context.model)
        )

    @spi.hookimpl
    def generate(self, request: spi.GenerateRequest) -> spi.GenerateResult:
        """Sample responses, all at once as far as the endpoints have places."""
        self._require_told(request.sampling)
        return self._endpoints.run(self._generated(request))

    @spi.hookimpl
    def stream(self, request: spi.StreamRequest) -> spi.StreamResult:
        """Sample what the feed brings; each answer is a request of its own, so that all join."""
        stream = _Stream(self._endpoints, request)
        try:
            while (taken := request.feed.take(wait=True)) is not None:
                for one in taken:
                    self._require_told(one.sampling)
                    stream.add(list(wanted_of(one, self._max_sequence_length)))
        except BaseException:
            stream.end(hand_out=False)
            raise
        stream.end(hand_out=True)
        return spi.StreamResult()

    @spi.hookimpl
    def refit(self, request: spi.RefitRequest) -> spi.RefitResult:
        """Refuse: endpoints keep the weights that they have."""
        raise spi.ContractError(f"refit: found weights of version {request.weight_version}; expected none, by an endpoint")

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Nothing of it is on a device here."""
        del request
        return spi.SetResidencyResult(device_bytes=0)

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:
        """Close the connections."""
        del request
        self._endpoints.close()

    async def _generated(self, request: spi.GenerateRequest) -> spi.GenerateResult:
        tasks = [asyncio.ensure_future(self._one(wanted, request)) for wanted in wanted_of(request, self._max_sequence_length)]
        try:
            return result_of(await asyncio.gather(*tasks), request.weight_version)
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, wanted: CompletionRequest, request: spi.GenerateRequest) -> Sample:
        sample = await self._endpoints.complete(wanted, self._endpoints.sample())
        if request.on_finished is not None:
            request.on_finished(wanted.number, result_of([sample], request.weight_version))
        return sample

    def _require_told(self, sampling: spi.SamplingParams) -> None:
        """ConfigError where the endpoint's log-probabilities are of another distribution than samples are to be of."""
        is_whole = sampling.temperature == 1.0 and sampling.top_k == 0 and sampling.top_p == 1.0
        if self._endpoints.probed.tells_raw and sampling.temperature != 0.0 and not is_whole:
            asked = f"temperature {sampling.temperature:g}, top_k {sampling.top_k} and top_p {sampling.top_p:g}"
            found = f"log-probabilities of the model itself, before {asked}"
            expected = "those of the distribution sampled from"
            remedy = "Start vLLM's server with --logprobs-mode processed_logprobs, or sample the whole distribution."
            raise spi.ConfigError([spi.Problem(path=f"{SECTION}.base_urls", found=found, expected=expected, remedy=remedy)])


class _Stream:
    """The samples of one stream. Its tasks and what they have come to belong to the endpoints' event loop."""

    def __init__(self, endpoints: Endpoints, request: spi.StreamRequest) -> None:
        self._endpoints = endpoints
        self._feed = request.feed
        self._version = request.weight_version
        self._error: BaseException | None = None
        self._is_cut = False
        self._count = 0
        self._under_way: dict[int, tuple[CompletionRequest, Sample, asyncio.Task[None]]] = {}

    def add(self, wanted: list[CompletionRequest]) -> None:
        """Begin samples, the next in the stream's order."""
        self._on_loop(partial(self._begin, self._count, wanted))
        self._count += len(wanted)

    def end(self, *, hand_out: bool) -> None:
        """Cut what has not ended and hand it out; raise what a sample failed with."""
        self._endpoints.run(self._cut(hand_out=hand_out))
        if hand_out and self._error is not None:
            raise self._error

    def _on_loop(self, call: Callable[[], None]) -> None:
        async def called() -> None:
            call()

        self._endpoints.run(called())

    def _begin(self, first: int, wanted: list[CompletionRequest]) -> None:
        for number, one in enumerate(wanted, first):
            sample = self._endpoints.sample()
            self._under_way[number] = (one, sample, asyncio.ensure_future(self._fill(number, one, sample)))

    async def _fill(self, number: int, wanted: CompletionRequest, sample: Sample) -> None:
        try:
            await self._endpoints.complete(wanted, sample)
            del self._under_way[number]
            self._deliver(number, sample)
        except BaseException as error:  # nobody awaits this task
            if self._is_cut:
                raise
            self._error = self._error or error
            self._feed.end()

    async def _cut(self, *, hand_out: bool) -> None:
        left, self._under_way, self._is_cut = self._under_way, {}, True
        for _, _, task in left.values():
            task.cancel()
        await asyncio.gather(*(task for _, _, task in left.values()), return_exceptions=True)
        if hand_out and self._error is None:
            for number, (wanted, sample, _) in left.items():
                self._deliver(number, sample.cut(wanted.sampling.stop_token_ids))

    def _deliver(self, number: int, sample: Sample) -> None:
        self._feed.deliver(np.array([number], np.int64), result_of([sample], self._version))

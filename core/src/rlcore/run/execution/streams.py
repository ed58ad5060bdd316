"""Stream requests through a generator. Without continuous batching, generate one request after another."""

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
from attrs import evolve

from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.spi import FinishReason, GenerateRequest, GenerateResult, RoutedExperts, StreamRequest, capabilities
from rlcore.spi.arrays import Int64Array, offsets_of, take_rows
from rlcore.spi.execution import ResponseFeed, Responses, TextDecoder


def run_stream(generator: GeneratorHandle, decoder: TextDecoder, feed: ResponseFeed, weight_version: int) -> None:
    """Generate the requests of a feed until it ends, and decode the samples.

    A generator without the capability `continuous` generates one request after another. Its stream has to end before a refit.
    """
    decoded = DecodedFeed(feed, decoder)
    if generator.has(capabilities.CONTINUOUS):
        generator.stream(StreamRequest(feed=decoded, weight_version=weight_version))
    else:
        _generate_in_waves(generator, decoded)
    decoded.finish()


def not_begun(num_samples: int) -> Responses:
    """Return empty results of samples that had not begun when the stream ended."""
    result = GenerateResult(
        tokens=np.zeros(0, np.int32),
        offsets=np.zeros(num_samples + 1, np.int64),
        logprobs=np.zeros(0, np.float32),
        weight_versions=np.zeros(0, np.int32),
        finish_reasons=np.full(num_samples, FinishReason.ABORTED, np.uint8),
    )
    return Responses(result=result, texts=[""] * num_samples)


class DecodedFeed:
    """Decodes the samples of a stream on their way from the generator to its feed."""

    def __init__(self, feed: ResponseFeed, decoder: TextDecoder) -> None:
        self._feed = feed
        self._decoder = decoder
        self._error: Exception | None = None

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """See rlcore.spi.SampleFeed."""
        return self._feed.take(wait=wait)

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        """Hand out samples with their texts. An error of the decoder's ends the stream: it would be lost in the generator's
        thread."""
        try:
            responses = Responses.of(result, self._decoder)
        except Exception as error:
            self._error = self._error or error
            self._feed.end()
        else:
            self._feed.deliver(samples, responses)

    def give_back(self, samples: Int64Array) -> None:
        """Hand out samples that have not begun."""
        self._feed.deliver(samples, not_begun(len(samples)))

    def end(self) -> None:
        """End the stream."""
        self._feed.end()

    def finish(self) -> None:
        """Raise what the decoder raised."""
        if self._error is not None:
            raise self._error


def _generate_in_waves(generator: GeneratorHandle, feed: DecodedFeed) -> None:
    """Generate the requests one after another."""
    first, waiting = 0, deque[GenerateRequest]()
    while (taken := feed.take(wait=not waiting)) is not None:
        waiting.extend(taken)
        if waiting:
            _generate_wave(generator, feed, waiting[0], first)
            first += len(waiting.popleft().seeds)
    num_left = sum(len(request.seeds) for request in waiting)
    if num_left:
        feed.give_back(first + np.arange(num_left))


def _generate_wave(generator: GeneratorHandle, feed: DecodedFeed, request: GenerateRequest, first: int) -> None:
    """Generate one request, whose samples are numbered from `first` on, and hand out each as it ends where that is known."""
    missing, lock = np.ones(len(request.seeds), np.bool_), threading.Lock()

    def hand_out(sample: int, result: GenerateResult) -> None:
        with lock:
            is_missing, missing[sample] = bool(missing[sample]), False
        if is_missing:
            feed.deliver(np.array([first + sample], np.int64), result)

    result = generator.generate(
        evolve(
            request,
            # The handle refuses what this leaves wrong: a request newer than the weights, and weights that do not count.
            weight_version=max(request.weight_version, generator.version_of(request.adapter) or 0),
            on_finished=hand_out if generator.has(capabilities.STREAMING) else None,
        )
    )
    left = np.flatnonzero(missing)
    if len(left):
        feed.deliver(first + left, _select(result, left))


def _select(result: GenerateResult, samples: Int64Array) -> GenerateResult:
    """Select samples of a result, int64 [M]."""
    routed, mask = result.routed_experts, result.sampling_mask
    return GenerateResult(
        tokens=take_rows(result.tokens, result.offsets, samples),
        offsets=offsets_of(np.diff(result.offsets)[samples]),
        logprobs=take_rows(result.logprobs, result.offsets, samples),
        weight_versions=take_rows(result.weight_versions, result.offsets, samples),
        finish_reasons=result.finish_reasons[samples],
        routed_experts=None
        if routed is None
        else RoutedExperts(
            experts=take_rows(routed.experts, routed.offsets, samples), offsets=offsets_of(np.diff(routed.offsets)[samples])
        ),
        sampling_mask=None if mask is None else mask.take(result.offsets, samples),
    )

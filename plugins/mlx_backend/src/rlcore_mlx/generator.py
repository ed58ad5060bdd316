"""Generator `mlx`: batches of samples with a KV cache, one token of each at a time."""

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
from attrs import evolve

from rlcore import spi
from rlcore.spi.arrays import Int64Array
from rlcore_mlx.cache import Cache
from rlcore_mlx.decoder import Decoder, Weights
from rlcore_mlx.directory import load_weights
from rlcore_mlx.export import digest_of
from rlcore_mlx.provider import MlxGeneratorConfig
from rlcore_mlx.sampling import position_keys, sample_tokens
from rlcore_torchkit.generation import FinishedSample, check_sampling, join_samples, sample_limits
from rlcore_torchkit.refit.arrivals import check_digests, check_names, check_shape, check_specs, refuse


class MlxGenerator:
    """MLX's arrays are never written to, so that tensors of the same library are kept as they came."""

    def __init__(self, context: spi.GeneratorContext, config: MlxGeneratorConfig) -> None:
        self.context, self.config = context, config
        self.decoder = Decoder.of(context.model)
        self.shapes = self.decoder.shapes()
        self.dtype = getattr(mx, context.model.dtype)
        self.weights: Weights = {}
        if context.channel is None:
            self.weights = load_weights(self.decoder, context.model, context.model.dtype)

    @spi.hookimpl
    def generate(self, request: spi.GenerateRequest) -> spi.GenerateResult:
        check_sampling(request.sampling)
        limits = sample_limits(request, self.context.max_sequence_length, self.decoder.dims.vocab_size)
        finished, size = [], self.config.max_batch_size
        for start in range(0, len(limits), size):
            numbers = np.arange(len(limits))[start : start + size]
            for sample in self.samples(request, numbers, limits[numbers]):
                finished.append(sample)
                if request.on_finished is not None:
                    request.on_finished(sample.number, join_samples([evolve(sample, number=0)]))
        return join_samples(finished)

    def samples(self, request: spi.GenerateRequest, numbers: Int64Array, limits: Int64Array) -> Iterator[FinishedSample]:
        """The samples of these numbers, each as it ends."""
        used, prompt_of = np.unique(numbers // request.num_samples, return_inverse=True)
        cache = Cache(self.decoder, self.weights)
        logits = cache.begin([request.prompts.sequence(index) for index in used], prompt_of)
        first = request.prompts.lengths[used][prompt_of]
        tokens = np.zeros((len(numbers), limits.max()), np.int32)
        logprobs = np.zeros(tokens.shape, np.float32)
        rows, running = np.arange(len(numbers)), np.ones(len(numbers), bool)
        for step in range(tokens.shape[1]):
            keys = position_keys(request.seeds[numbers[rows]], first[rows] + step)
            drawn = sample_tokens(logits, keys, request.sampling)
            mx.eval(drawn)
            tokens[rows, step], logprobs[rows, step] = drawn
            stopped = np.isin(tokens[rows, step], request.sampling.stop_token_ids)
            ended = running & (stopped | (step + 1 >= limits[rows]))
            for place in np.flatnonzero(ended):
                row = rows[place]
                yield FinishedSample(
                    number=int(numbers[row]),
                    tokens=tokens[row, : step + 1].copy(),
                    logprobs=logprobs[row, : step + 1].copy(),
                    weight_versions=np.full(step + 1, request.weight_version, np.int32),
                    finish_reason=spi.FinishReason.STOP if stopped[place] else spi.FinishReason.LENGTH,
                )
            running &= ~ended
            if not running.any():
                return
            logits = cache.step(tokens[rows, step])
            if 2 * running.sum() <= len(rows):  # rows that have ended are worth a copy of the others once they are half
                kept = np.flatnonzero(running)
                logits, rows, running = cache.keep(kept, logits), rows[kept], running[kept]

    @spi.hookimpl
    def refit(self, request: spi.RefitRequest) -> spi.RefitResult:
        self.weights = {}
        check_specs(request.weights.specs, self.shapes)
        received: dict[str, mx.array] = {}
        digests: dict[str, int] = {}
        for bucket in request.weights.buckets:
            check_names([named.name for named in bucket.tensors], self.shapes, received)
            for named in bucket.tensors:
                tensor = mx.array(named.tensor)
                check_shape(named.name, tensor.shape, self.shapes)
                digests[named.name] = digest_of(tensor)
                received[named.name] = tensor.astype(self.dtype)
            check_digests(digests, {named.name: named.digest for named in bucket.tensors})
        mx.eval(received)
        refuse("missing from the buckets", self.shapes.keys() - received.keys())
        self.weights = received
        return spi.RefitResult(weight_version=request.weight_version, digests=digests)

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:  # noqa: ARG002 - one memory
        return spi.SetResidencyResult(device_bytes=sum(weight.nbytes for weight in self.weights.values()))

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:  # noqa: ARG002 - the hook's form
        self.weights = {}
        mx.clear_cache()

"""The generator's hooks. The core calls them only where they are legal, so what is open and resident is not checked again."""

from typing import Any

import numpy as np
import torch

from rlcore import spi
from rlcore_sglang.check import model_problems
from rlcore_sglang.config import SglangConfig
from rlcore_sglang.engine import Engine
from rlcore_sglang.refit import Refit
from rlcore_sglang.sampling import SMALLEST_TEMPERATURE, engine_sampling, finish_reason
from rlcore_sglang.settings import engine_arguments
from rlcore_torchkit.generation import FinishedSample, check_sampling, join_samples, sample_limits
from rlcore_torchkit.huggingface.models import checkpoint_shapes, dims_of, load_model
from rlcore_torchkit.huggingface.safetensors_files import check_hub_files


class SglangBackend:
    """Generates with an SGLang engine, and the weights of a trainer or the model's own."""

    def __init__(self, context: spi.GeneratorContext, config: SglangConfig) -> None:
        self._context = context
        self._config = config
        model = load_model(context.model, dtype=getattr(torch, context.model.dtype), device="meta")
        self._dims = dims_of(model.config)
        if problems := model_problems(self._dims, config):
            raise spi.ModelError(problems)
        self._shapes = checkpoint_shapes(model)
        self._weight_bytes = sum(tensor.nbytes for tensor in model.parameters())
        self._refit: Refit | None = None
        self._away: list[str] = []
        """The parts that the engine is to hold no device memory for: of "weights" and "kv_cache"."""
        if context.channel is None:
            check_hub_files(context.model)
        self._engine = self._start()
        if context.channel is not None:
            self._refit = Refit(context.channel, self._shapes, config)

    @spi.hookimpl
    def generate(self, request: spi.GenerateRequest) -> spi.GenerateResult:
        """Sample responses. Several calls may be under way."""
        sampling = request.sampling
        check_sampling(sampling, SMALLEST_TEMPERATURE)
        limits = sample_limits(request, self._context.max_sequence_length, self._dims.vocab_size).tolist()
        samples = [
            {
                "number": number,
                "prompt": request.prompts.sequence(number // request.num_samples).tolist(),
                "sampling": engine_sampling(sampling, limit),
            }
            for number, limit in enumerate(limits)
        ]
        finished: list[FinishedSample] = []

        def end(content: Any) -> None:
            sample = _finished(content, limits, request)
            finished.append(sample)
            if request.on_finished is not None:
                request.on_finished(sample.number, join_samples([sample]))

        if samples:
            timeout_s = self._config.generate_timeout_s
            self._engine.generate(samples, end, timeout_s=timeout_s, key="generate_timeout_s")
        return join_samples(finished)

    @spi.hookimpl
    def refit(self, request: spi.RefitRequest) -> spi.RefitResult:
        """Take over weights, and drop the cache of prefixes. After a failure there are none, until a refit succeeds; where the
        engine has ended, it is started anew."""
        if self._refit is None or request.channel != self._context.channel:
            raise spi.ContractError(f"refit: found channel {request.channel}; expected {self._context.channel}")
        if not self._engine.is_usable:
            self._engine.end()
            self._engine = self._start()
        held = self._refit.run(self._engine, request.weights)
        self._weight_bytes = held.num_bytes
        return spi.RefitResult(weight_version=request.weight_version, digests=held.digests)

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Free weights and KV cache on a GPU, or take their memory back; on a CPU both places are one. An engine that fails in
        it, or has ended before, is where it is asked to be once the next refit has started it anew."""
        places = {"weights": request.weights, "kv_cache": request.state}
        if self._context.rank_info.device == "cuda":
            self._away = [part for part, place in places.items() if place == "host"]
            try:
                self._move(self._engine)
            except spi.WorkerError:
                self._engine.end()  # what it has moved is not known
                raise
        else:
            places = dict.fromkeys(places, "device")
        sizes = {"weights": self._weight_bytes, "kv_cache": self._cache_bytes}
        return spi.SetResidencyResult(device_bytes=sum(sizes[part] for part, place in places.items() if place == "device"))

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:
        """End the engine and its processes."""
        del request
        self._engine.end()
        if self._refit is not None:
            self._refit.close()

    def held_digests(self) -> list[dict[str, int]]:
        """The digest of each tensor that a process of the engine computes with; nothing may be generating."""
        refit = self._refit or Refit("directory", self._shapes, self._config)
        try:
            return refit.held_digests(self._engine)
        finally:
            if refit is not self._refit:
                refit.close()

    def _start(self) -> Engine:
        config = self._config
        engine = Engine(engine_arguments(self._context, config), self._context.log_directory, config.start_timeout_s)
        try:
            num_tokens = engine.ask("num_cached_tokens", timeout_s=config.start_timeout_s, key="start_timeout_s")
            if self._away:
                self._move(engine)
        except BaseException:
            engine.end()
            raise
        dims, item_bytes = self._dims, getattr(torch, self._context.model.dtype).itemsize
        self._cache_bytes = num_tokens * dims.num_layers * 2 * dims.num_kv_heads * dims.head_dim * item_bytes
        return engine

    def _move(self, engine: Engine) -> None:
        engine.ask("move", self._away, timeout_s=self._config.refit_timeout_s, key="refit_timeout_s")


def _finished(content: Any, limits: list[int], request: spi.GenerateRequest) -> FinishedSample:
    """A sample as the host sends it."""
    number, tokens, logprobs, reason = content
    values = np.array(logprobs, np.float32)
    if not np.isfinite(values).all():
        raise spi.NonFiniteError(f"sample {number}: found a log-probability that is NaN or infinite; are the weights finite?")
    return FinishedSample(
        number=number,
        tokens=np.array(tokens, np.int32),
        logprobs=values,
        weight_versions=np.full(len(tokens), request.weight_version, np.int32),
        finish_reason=finish_reason(reason, tokens, limits[number], request.sampling.stop_token_ids),
    )

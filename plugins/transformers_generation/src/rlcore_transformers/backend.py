"""The generator: hooks, and the states in which each is legal."""

from functools import partial
from typing import Any

import numpy as np
import torch

from rlcore import spi
from rlcore.spi.arrays import Int64Array
from rlcore_torchkit.generation import check_sampling, sample_limits
from rlcore_torchkit.models import architecture_of, checkpoint_shapes, load_model, standard_config
from rlcore_transformers.cache import SlotCache
from rlcore_transformers.check import model_problems
from rlcore_transformers.config import TransformersConfig
from rlcore_transformers.engine import Generation
from rlcore_transformers.forward import Decoder
from rlcore_transformers.routing import Routing
from rlcore_transformers.stopping import StopStrings, load_tokenizer
from rlcore_transformers.weights import HeldWeights


class TransformersBackend:
    """Generates with the architecture of a Hugging Face model and the weights of a trainer."""

    def __init__(self, context: spi.GeneratorContext, config: TransformersConfig) -> None:
        self._context = context
        self._options = config
        self._dtype: torch.dtype = getattr(torch, context.model.dtype)
        self._device = (
            torch.device("cuda", context.rank_info.local_rank) if context.rank_info.device == "cuda" else torch.device("cpu")
        )
        model = load_model(context.model, dtype=self._dtype, device="meta")
        standard, path = standard_config(model.config), context.model.path
        problems = model_problems(standard, path, context.max_sequence_length, routed_experts=context.routed_experts)
        if problems:
            raise spi.ModelError(problems)
        self._config: Any = model.config
        rotary = type(model.get_submodule(architecture_of(model.config).modules.rotary))(model.config)
        self._decoder = Decoder(model.config, rotary, context.max_sequence_length, self._dtype, self._device)
        self._weights = HeldWeights(checkpoint_shapes(model), self._dtype, self._device)
        self._cache: SlotCache | None = None
        self._tokenizer: Any = None

    @spi.hookimpl
    def generate(self, request: spi.GenerateRequest) -> spi.GenerateResult:
        """Sample responses. Logits are those of the model's dtype; everything after them is float32."""
        check_sampling(request.sampling)
        limits = sample_limits(request, self._context.max_sequence_length, self._decoder.dims.vocab_size)
        if not len(limits):
            return _empty_result(request, self._decoder)
        strings = request.sampling.stop_strings
        try:
            with torch.inference_mode():
                return Generation(
                    request,
                    limits,
                    self._decoder,
                    self._slots(request, limits),
                    self._options.max_prefill_tokens,
                    partial(StopStrings, self._load_tokenizer(), strings) if strings else None,
                ).run()
        except BaseException:
            # What an interrupted or failed run left in the cache may not be finite.
            self._cache = None
            raise

    @spi.hookimpl
    def refit(self, request: spi.RefitRequest) -> spi.RefitResult:
        """Take over weights. After a failure there are none, until a refit succeeds."""
        self._decoder.unbind()
        with torch.no_grad():
            digests = self._weights.receive(request.weights, request.may_alias)
        self._decoder.bind(self._weights.tensors)
        return spi.RefitResult(weight_version=request.weight_version, digests=digests)

    @spi.hookimpl
    def set_residency(self, request: spi.SetResidencyRequest) -> spi.SetResidencyResult:
        """Move the weights, or let go of them; free the cache on "host". It is allocated again by the next generate."""
        if request.discard_weights:
            self._decoder.unbind()
            self._weights.drop()
        if self._device.type != "cpu":
            self._weights.move(self._device if request.weights == "device" else torch.device("cpu"))
            if self._weights.tensors:
                self._decoder.bind(self._weights.tensors)
        if request.state == "host":
            self._cache = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        cache_bytes = 0 if self._cache is None else self._cache.num_bytes
        return spi.SetResidencyResult(device_bytes=self._weights.num_bytes(self._device) + cache_bytes)

    @spi.hookimpl
    def close(self, request: spi.CloseRequest) -> None:
        """Let go of weights and cache."""
        del request
        self._decoder.unbind()
        self._weights.drop()
        self._cache = self._tokenizer = None

    def _slots(self, request: spi.GenerateRequest, limits: Int64Array) -> SlotCache:
        """A cache for this request: the last one if it is large enough."""
        num_slots = min(self._options.max_batch_size, len(limits))
        length = int((np.repeat(request.prompts.lengths, request.num_samples) + limits).max())
        if self._cache is None or self._cache.num_slots < num_slots or self._cache.length < length:
            self._cache = None
            shape = (self._decoder.dims.num_kv_heads, self._decoder.dims.head_dim)
            self._cache = SlotCache(self._config, num_slots, length, shape, self._dtype, self._device)
        return self._cache

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._context.model)
        return self._tokenizer


def _empty_result(request: spi.GenerateRequest, decoder: Decoder) -> spi.GenerateResult:
    """The answer to a request without samples."""
    nowhere = np.zeros(0, np.int64)
    routing = Routing(request, nowhere, decoder.routing_shape) if request.routed_experts else None
    return spi.GenerateResult(
        tokens=np.zeros(0, np.int32),
        offsets=np.zeros(1, np.int64),
        logprobs=np.zeros(0, np.float32),
        weight_versions=np.zeros(0, np.int32),
        finish_reasons=np.zeros(0, np.uint8),
        routed_experts=None if routing is None else routing.result(nowhere),
    )

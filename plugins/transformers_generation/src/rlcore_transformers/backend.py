"""The generator: hooks, and the states in which each is legal."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from rlcore import spi
from rlcore_torchkit.adapters.lora_targets import adapted_layers, adapter_shapes
from rlcore_torchkit.architectures.decoders import is_described
from rlcore_torchkit.channels.local import LocalChannel
from rlcore_torchkit.generation import FinishedSample, check_sampling, join_samples, sample_limits
from rlcore_torchkit.huggingface.models import (
    architecture_of,
    checkpoint_shapes,
    checkpoint_tensors,
    dims_of,
    load_model,
    standard_config,
)
from rlcore_torchkit.json_schema import guided_schema
from rlcore_transformers.cache import SlotCache
from rlcore_transformers.check import class_problems, model_problems
from rlcore_transformers.class_forward import ClassDecoder
from rlcore_transformers.config import TransformersConfig
from rlcore_transformers.decoder import Decoder
from rlcore_transformers.engine import Generation
from rlcore_transformers.forward import FamilyDecoder
from rlcore_transformers.jobs import Deliver
from rlcore_transformers.schemas import SchemaMatcher, SchemaVocabulary
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
        place = "meta" if context.channel is not None else "cpu"
        model = load_model(context.model, dtype=self._dtype, device=place, any_decoder=True)
        self._config: Any = model.config
        self._decoder = self._make_decoder(model)
        self._weights = HeldWeights(checkpoint_shapes(model) | self._adapter_shapes(), self._dtype, self._device)
        self._channel = _local_channel(context.channel, self._device)
        if context.channel is None:
            self._weights.adopt(checkpoint_tensors(model))
            self._bind()
        self._cache: SlotCache | None = None
        self._tokenizer: Any = None
        self._vocabularies: dict[tuple[int, ...], SchemaVocabulary] = {}
        """The vocabulary for schemas, by the tokens that end a sample."""

    @spi.hookimpl
    def generate(self, request: spi.GenerateRequest) -> spi.GenerateResult:
        """Sample responses. Logits are those of the model's dtype; everything after them is float32."""
        finished: list[FinishedSample] = []
        with self._generation(request.weight_version) as generation:
            self._add(generation, request, finished.extend)
            while not generation.is_idle:
                generation.step()
        return join_samples(finished, routed_experts=request.routed_experts, sampling_mask=request.sampling_mask)

    @spi.hookimpl
    def stream(self, request: spi.StreamRequest) -> spi.StreamResult:
        """Sample what the feed brings; requests join between two tokens."""
        feed, first = request.feed, 0
        with self._generation(request.weight_version) as generation:
            while (taken := feed.take(wait=generation.is_idle)) is not None:
                for one in taken:
                    self._add(generation, one, partial(_deliver, feed, first, one))
                    first += len(one.seeds)
                if not generation.is_idle:
                    generation.step()
            generation.cut()
        return spi.StreamResult()

    @spi.hookimpl
    def refit(self, request: spi.RefitRequest) -> spi.RefitResult:
        """Take over weights. After a failure there are none, until a refit succeeds."""
        self._decoder.unbind()
        weights = request.weights if self._channel is None else self._channel.received(request.weights)
        with torch.no_grad():
            digests = self._weights.receive(weights, request.may_alias)
        self._bind()
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
                self._decoder.unbind()
                self._bind()
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
        if self._channel is not None:
            self._channel.close()
        self._cache = self._tokenizer = None

    def _make_decoder(self, model: Any) -> Decoder:
        """Make the decoder of this transformers model; ModelError where there is none."""
        context, length = self._context, self._context.max_sequence_length
        if not is_described(model):
            _raise_problems(class_problems(model.config.to_dict(), context.model.path, length))
            return ClassDecoder(model, self._dtype, self._device)
        standard = standard_config(model.config)
        _raise_problems(model_problems(standard, context.model.path, length, routed_experts=context.routed_experts))
        rotary = type(model.get_submodule(architecture_of(model.config).modules.rotary))(model.config)
        return FamilyDecoder(model.config, rotary, length, self._dtype, self._device)

    def _adapter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of A and B of adapters that come apart from the weights, by name."""
        lora = self._context.lora
        if lora is None:
            return {}
        return adapter_shapes(adapted_layers(architecture_of(self._config), dims_of(self._config), lora), lora.rank)

    @torch.no_grad()
    def _bind(self) -> None:
        """Compute with the weights held. Adapters are merged into copies: what they are merged into has to stay as it is."""
        lora = self._context.lora
        self._decoder.bind(self._weights.tensors if lora is None else self._weights.merged(lora))

    @contextmanager
    def _generation(self, weight_version: int) -> Iterator[Generation]:
        """Run the requests of one call with the cache. A call that fails gives none back, since it may hold what is not
        finite."""
        cache, self._cache = self._cache, None
        with torch.inference_mode():
            generation = Generation(
                self._decoder,
                cache,
                max_batch_size=self._options.max_batch_size,
                max_prefill_tokens=self._options.max_prefill_tokens,
                max_length=self._context.max_sequence_length,
                device=self._device,
                weight_version=weight_version,
                new_stop_strings=lambda strings: StopStrings(self._load_tokenizer(), strings),
                new_matcher=self._new_matcher,
            )
            del cache
            yield generation
        self._cache = generation.cache

    def _add(self, generation: Generation, request: spi.GenerateRequest, deliver: Deliver) -> None:
        check_sampling(request.sampling)
        if request.sampling.json_schema is not None:
            guided_schema(request.sampling.json_schema)  # a wrong one fails here, and not among the samples of others
        limits = sample_limits(request, self._context.max_sequence_length, self._decoder.vocab_size)
        if len(limits):
            generation.add(request, limits, deliver)

    def _new_matcher(self, sampling: spi.SamplingParams) -> SchemaMatcher:
        """Return the matcher of one sample."""
        assert sampling.json_schema is not None
        vocabulary = self._vocabularies.get(sampling.stop_token_ids)
        if vocabulary is None:
            vocabulary = SchemaVocabulary(self._load_tokenizer(), self._decoder.vocab_size, sampling.stop_token_ids)
            self._vocabularies[sampling.stop_token_ids] = vocabulary
        return vocabulary.begin(sampling.json_schema)

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._context.model)
        return self._tokenizer


def _local_channel(name: str | None, device: torch.device) -> LocalChannel | None:
    """Return the channel that weights come by; None where none do, or where they are handed over as they are."""
    channel = None if name is None else spi.find_channel(name)
    return None if channel is None or channel.sender is None else LocalChannel(channel, device)


def _raise_problems(problems: Sequence[spi.Problem]) -> None:
    """ModelError with them, if there are any."""
    if problems:
        raise spi.ModelError(problems)


def _deliver(feed: spi.SampleFeed, first: int, request: spi.GenerateRequest, finished: Sequence[FinishedSample]) -> None:
    """Hand out samples of a request, the first of which has the number `first` in the stream."""
    numbers = np.array(sorted(first + sample.number for sample in finished))
    result = join_samples(finished, routed_experts=request.routed_experts, sampling_mask=request.sampling_mask)
    feed.deliver(numbers, result)

"""Fake numpy backends whose every hook a test can replace."""

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from attrs import evolve, frozen

from rlcore.registry.binding import build_generator, build_trainer
from rlcore.registry.discovery import ObserverEntry, Registry
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.registry.trainer_handle import TrainerHandle
from rlcore.spi import (
    FinishReason,
    ForwardBackwardResult,
    ForwardBackwardTogetherResult,
    GenerateResult,
    GeneratorContext,
    Head,
    LoadStateResult,
    LogprobsResult,
    ModelSpec,
    NamedTensor,
    OptimStepResult,
    Provider,
    RankInfo,
    RefitResult,
    SaveStateResult,
    SetResidencyResult,
    TensorSpec,
    TokenBatch,
    TrainerContext,
    TrainerLayout,
    TrainStepResult,
    UseAdapterResult,
    ValuesResult,
    WeightBucket,
    WeightExport,
    capabilities,
    hookimpl,
    tensor_digest,
)

ALL = capabilities.KNOWN - {capabilities.AGENT}
"""Every capability but the one that gives an environment other methods."""


@frozen(kw_only=True)
class FakeConfig:
    """A recipe section."""

    size: int = 1
    """A size."""


MODEL = ModelSpec(path="model")
TRAINER_CONTEXT = TrainerContext(
    model=MODEL, rank_info=RankInfo(), seed=0, num_train_steps=1, needs_reference=True, max_sequence_length=16
)
GENERATOR_CONTEXT = GeneratorContext(model=MODEL, rank_info=RankInfo(), seed=0, max_sequence_length=16)


class FakeTrainer:
    """Answers every hook as the interface wants it; two weights of a few numbers."""

    def __init__(self, context, config) -> None:
        self.context, self.config = context, config
        self.layout = TrainerLayout()
        self.weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}
        self.calls = []
        self.versions = {}
        """Those that use_adapter returns."""

    @hookimpl
    def train_step(self, request):
        self.calls.append("train_step")
        version = request.weight_version + 1
        return TrainStepResult(weight_version=version, loss=0.5, grad_norm=1.0, learning_rate=1e-3, metrics={"kl": 0.1})

    @hookimpl
    def forward_backward(self, request):
        self.calls.append("forward_backward")
        logprobs = tuple(_ragged(batch, -1.0) for batch in request.microbatches) if request.logprobs else None
        return ForwardBackwardResult(loss=0.5, metrics={"kl": 0.1}, logprobs=logprobs, weight_version=request.weight_version)

    @hookimpl
    def optim_step(self, request):
        self.calls.append("optim_step")
        norms = {"a": 0.6, "b": 0.8} if request.gradient_norms else None
        version = request.weight_version + 1
        return OptimStepResult(weight_version=version, grad_norm=1.0, learning_rate=1e-3, gradient_norms=norms)

    @hookimpl
    def use_adapter(self, request):
        return UseAdapterResult(weight_version=0 if request.seed is not None else self.versions[request.name])

    @hookimpl
    def forward_backward_together(self, request):
        self.calls.append("forward_backward_together")
        return ForwardBackwardTogetherResult(
            pieces={
                name: ForwardBackwardResult(loss=0.5, weight_version=piece.weight_version)
                for name, piece in request.pieces.items()
            }
        )

    @hookimpl
    def get_logprobs(self, request):
        columns = tuple(_ragged(batch, -1.0) for batch in request.microbatches)
        entropy = tuple(_ragged(batch, 1.0) for batch in request.microbatches) if request.entropy else None
        return LogprobsResult(logprobs=columns, entropy=entropy, weight_version=request.weight_version)

    @hookimpl
    def get_values(self, request):
        values = tuple(np.full(batch.num_tokens, 0.25, np.float32) for batch in request.microbatches)
        return ValuesResult(values=values, weight_version=request.weight_version)

    @hookimpl
    def export_weights(self, request):
        specs = tuple(TensorSpec(name=name, shape=array.shape, dtype="float32") for name, array in self.weights.items())
        tensors = (NamedTensor(name=name, tensor=array, digest=tensor_digest(array)) for name, array in self.weights.items())
        buckets = (WeightBucket(tensors=(tensor,)) for tensor in tensors)
        return WeightExport(weight_version=request.weight_version, specs=specs, buckets=buckets, persistent=True)

    @hookimpl
    def set_residency(self, request):
        return SetResidencyResult(device_bytes=0)

    @hookimpl
    def save_state(self, request):
        (request.directory / "state.json").write_text("{}")
        return SaveStateResult(files=("state.json",))

    @hookimpl
    def load_state(self, request):
        return LoadStateResult(weight_version=7)

    @hookimpl
    def close(self, request):
        self.calls.append("close")


class FakeGenerator:
    """Answers every hook as the interface wants it: each sample is token 5 to its limit."""

    def __init__(self, context, config) -> None:
        self.held = {}
        self.calls = []

    @hookimpl
    def generate(self, request):
        offsets = np.concatenate([[0], np.cumsum(request.max_tokens)]).astype(np.int64)
        total = int(offsets[-1])
        return GenerateResult(
            tokens=np.full(total, 5, np.int32),
            offsets=offsets,
            logprobs=np.full(total, -0.5, np.float32),
            weight_versions=np.full(total, request.weight_version, np.int32),
            finish_reasons=np.full(len(request.max_tokens), FinishReason.LENGTH, np.uint8),
        )

    @hookimpl
    def refit(self, request):
        self.held = {tensor.name: tensor.tensor.copy() for bucket in request.weights.buckets for tensor in bucket.tensors}
        digests = {name: tensor_digest(array) for name, array in self.held.items()}
        return RefitResult(weight_version=request.weight_version, digests=digests)

    @hookimpl
    def set_residency(self, request):
        return SetResidencyResult(device_bytes=0)

    @hookimpl
    def close(self, request):
        self.calls.append("close")


def _ragged(batch: TokenBatch, value: float) -> np.ndarray:
    column = np.full(batch.num_tokens, value, np.float32)
    column[batch.offsets[:-1]] = 0.0
    return column


@pytest.fixture
def backends(monkeypatch) -> ModuleType:
    """The importable module `fake_backends`, with the classes Trainer and Generator."""
    module = ModuleType("fake_backends")
    module.Trainer, module.Generator, module.Config = FakeTrainer, FakeGenerator, FakeConfig
    monkeypatch.setitem(sys.modules, "fake_backends", module)
    return module


@pytest.fixture
def make_provider(backends) -> Callable[..., Provider]:
    def make(name: str = "fake", **options: Any) -> Provider:
        defaults = {"spi": (2, 0), "config": FakeConfig, "backend": "fake_backends:Trainer", "capabilities": ALL}
        return Provider(name=name, **{**defaults, **options})

    return make


@pytest.fixture
def make_trainer(backends, make_provider) -> Callable[..., TrainerHandle]:
    """A handle on a FakeTrainer some of whose hooks are replaced: make_trainer(train_step=lambda self, request: ...)."""

    def make(
        observers=(), declared=ALL, head: Head = "tokens", needs_policy=True, lora=None, **hooks: Callable[..., Any]
    ) -> TrainerHandle:
        backends.Trainer = _with_hooks(FakeTrainer, hooks)
        (entry,) = Registry.from_providers({"trainer": [make_provider(capabilities=declared)]}).of("trainer")
        context = evolve(TRAINER_CONTEXT, head=head, needs_reference=head == "tokens", needs_policy=needs_policy, lora=lora)
        return build_trainer(entry, context, FakeConfig(), observing(*observers))

    return make


@pytest.fixture
def make_generator(backends, make_provider) -> Callable[..., GeneratorHandle]:
    """A handle on a FakeGenerator some of whose hooks are replaced."""

    def make(
        observers=(), declared=ALL, max_sequence_length: int = 16, model: str = "model", **hooks: Callable[..., Any]
    ) -> GeneratorHandle:
        backends.Generator = _with_hooks(FakeGenerator, hooks)
        provider = make_provider(backend="fake_backends:Generator", capabilities=declared)
        (entry,) = Registry.from_providers({"generator": [provider]}).of("generator")
        context = evolve(GENERATOR_CONTEXT, max_sequence_length=max_sequence_length, model=ModelSpec(path=model))
        return build_generator(entry, context, FakeConfig(), observing(*observers))

    return make


def observing(*observers: object) -> list[ObserverEntry]:
    """Observers as they are installed, all of one distribution."""
    names = [getattr(observer, "__name__", type(observer).__name__) for observer in observers]
    return [
        ObserverEntry(name=name, distribution="acme-watch", version="1.0", observer=observer)
        for name, observer in zip(names, observers, strict=True)
    ]


def _with_hooks(base: type, hooks: Mapping[str, Callable[..., Any]]) -> type:
    """A subclass in which each given function(self, request) is the hook of its name; None stands for no hook."""
    return type(base.__name__, (base,), {name: function and hookimpl(function) for name, function in hooks.items()})


@pytest.fixture
def batch() -> TokenBatch:
    """Two sequences of three and two tokens."""
    return TokenBatch(
        tokens=np.arange(5, dtype=np.int32),
        offsets=np.array([0, 3, 5], np.int64),
        loss_mask=np.array([False, True, True, False, True]),
    )

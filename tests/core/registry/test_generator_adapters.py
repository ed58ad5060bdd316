"""The handle of a generator with several adapters: a version for each, and nothing of those that are not held."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.binding import build_generator
from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.spi import (
    ContractError,
    GenerateRequest,
    GeneratorContext,
    LoraSpec,
    ModelSpec,
    NamedTensor,
    RaggedTokens,
    RankInfo,
    RefitError,
    RefitRequest,
    SamplingParams,
    SetResidencyRequest,
    StreamRequest,
    TensorSpec,
    WeightBucket,
    WeightExport,
    capabilities,
    hookimpl,
    tensor_digest,
)
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.generator import FakeGenerator, FakeGeneratorConfig
from rlcore.testing.fakes.policy import make_weights
from rlcore.testing.fakes.providers import FAKE_GENERATOR
from rlcore.testing.fakes.tokenizer import VOCABULARY_SIZE

LORA = LoraSpec(rank=1, targets=("transition",))
CONTEXT = GeneratorContext(
    model=ModelSpec(path="fake"), rank_info=RankInfo(), seed=0, max_sequence_length=16, lora=LORA, max_adapters=2
)
WEIGHTS = make_weights(VOCABULARY_SIZE, 0, 1.0)
ADAPTER = {
    "transition.lora_A.weight": np.ones((1, VOCABULARY_SIZE), np.float32),
    "transition.lora_B.weight": np.ones((VOCABULARY_SIZE, 1), np.float32),
}


class RemembersOldDigests(FakeGenerator):
    """Acknowledges the first values of each adapter."""

    @hookimpl
    def refit(self, request: RefitRequest) -> Any:
        result = super().refit(request)
        kept = self.__dict__.setdefault("digests", {}).setdefault(request.adapter, result.digests)
        return evolve(result, digests=kept)


def built(backend: type = FakeGenerator, **changes: Any) -> GeneratorHandle:
    (entry,) = fake_registry().of("generator")
    provider = evolve(FAKE_GENERATOR, backend=f"{backend.__module__}:{backend.__name__}")
    lacks = changes.pop("lacks", frozenset())
    entry = evolve(entry, provider=evolve(provider, capabilities=provider.capabilities - lacks))
    return build_generator(entry, evolve(CONTEXT, **changes), FakeGeneratorConfig())


@pytest.fixture
def generator() -> Iterator[GeneratorHandle]:
    """Holds "" of version 3 and "one" of version 0."""
    handle = built()
    handle.refit(refit_of({**WEIGHTS, **ADAPTER}, 3))
    handle.refit(refit_of(ADAPTER, 0, "one"))
    yield handle
    handle.close()


def refit_of(weights: Mapping[str, Any], version: int, adapter: str = "", drops: tuple[str, ...] = ()) -> RefitRequest:
    specs = tuple(TensorSpec(name=name, shape=array.shape, dtype="float32") for name, array in weights.items())
    tensors = tuple(NamedTensor(name=name, tensor=array, digest=tensor_digest(array)) for name, array in weights.items())
    export = WeightExport(weight_version=version, specs=specs, buckets=iter([WeightBucket(tensors=tensors)]), persistent=False)
    return RefitRequest(
        weight_version=version, channel="in_process", weights=export, may_alias=False, adapter=adapter, drops=drops
    )


def request_of(version: int, adapter: str = "") -> GenerateRequest:
    return GenerateRequest(
        prompts=RaggedTokens.from_lists([[1, 2]]),
        num_samples=1,
        seeds=np.zeros(1, np.int64),
        max_tokens=np.full(1, 3, np.int32),
        sampling=SamplingParams(),
        weight_version=version,
        adapter=adapter,
    )


class OneRequest:
    """A feed of one request."""

    def __init__(self, request: GenerateRequest) -> None:
        self.requests, self.delivered, self.has_ended = [request], 0, False

    def take(self, *, wait: bool) -> Any:
        if self.has_ended or self.delivered:
            return None
        taken, self.requests = self.requests, []
        return taken

    def deliver(self, samples: Any, result: Any) -> None:
        self.delivered += len(samples)

    def end(self) -> None:
        self.has_ended = True


def test_each_adapter_has_a_version(generator: GeneratorHandle) -> None:
    assert [generator.version_of(name) for name in ("", "one", "two")] == [3, 0, None]
    assert generator.weight_version == 0, "expected the version that came last"
    assert set(generator.generate(request_of(3)).weight_versions.tolist()) == {3}
    assert set(generator.generate(request_of(0, "one")).weight_versions.tolist()) == {0}


@pytest.mark.parametrize(
    ("version", "adapter", "text"), [(0, "two", "'two'.*'one' of version 0"), (3, "one", "version 3.*'one' of version 0")]
)
def test_adapters_and_versions_that_are_not_held_are_refused(
    generator: GeneratorHandle, version: int, adapter: str, text: str
) -> None:
    with pytest.raises(ContractError, match=f"generate.*{text}"):
        generator.generate(request_of(version, adapter))
    feed = OneRequest(request_of(version, adapter))
    with pytest.raises(ContractError, match="stream.*took a request"):
        generator.stream(StreamRequest(feed=feed, weight_version=3))


def test_a_stream_begins_at_the_version_of_any_adapter(generator: GeneratorHandle) -> None:
    for version in (0, 3):
        feed = OneRequest(request_of(0, "one"))
        generator.stream(StreamRequest(feed=feed, weight_version=version))
        assert feed.delivered == 1
    with pytest.raises(ContractError, match="stream at weight version 4"):
        generator.stream(StreamRequest(feed=OneRequest(request_of(4)), weight_version=4))


@pytest.mark.parametrize("drops", [("two",), ("new",), ("",) * 2 + ("two",)])
def test_dropping_what_is_not_held_is_refused(generator: GeneratorHandle, drops: tuple[str, ...]) -> None:
    with pytest.raises(ContractError, match="in drops.*'one' of version 0"):
        generator.refit(refit_of(ADAPTER, 0, "new", drops))
    assert generator.version_of("one") == 0


def test_one_adapter_too_many_is_refused_until_another_is_dropped(generator: GeneratorHandle) -> None:
    with pytest.raises(ContractError, match="max_adapters = 2.*drops"):
        generator.refit(refit_of(ADAPTER, 0, "two"))
    generator.refit(refit_of(ADAPTER, 1, "one"))
    generator.refit(refit_of(ADAPTER, 8, "two", ("one",)))
    assert [generator.version_of(name) for name in ("", "one", "two")] == [3, None, 8]


def test_the_models_weights_forget_other_adapters(generator: GeneratorHandle) -> None:
    generator.refit(refit_of({**WEIGHTS, **ADAPTER}, 5, "two"))
    assert [generator.version_of(name) for name in ("", "one", "two")] == [None, None, 5]


def test_discarded_weights_and_failed_refits_cost_all_adapters(generator: GeneratorHandle) -> None:
    generator.set_residency(SetResidencyRequest(weights="device", state="device", discard_weights=True))
    assert generator.version_of("one") is None
    generator.refit(refit_of({**WEIGHTS, **ADAPTER}, 3))
    with pytest.raises(RefitError):
        generator.refit(refit_of({name: array for name, array in ADAPTER.items() if "A" in name}, 0, "one"))
    assert generator.version_of("") is None


def test_digests_are_those_of_the_adapter_that_came() -> None:
    handle = built(RemembersOldDigests)
    handle.refit(refit_of({**WEIGHTS, **ADAPTER}, 0))
    handle.refit(refit_of(ADAPTER, 0, "one"))
    other = {name: 2 * array for name, array in ADAPTER.items()}
    with pytest.raises(RefitError, match="lora_A.weight.*held with other values"):
        handle.refit(refit_of(other, 1, "one"))
    handle.close()


def test_several_adapters_need_the_capability() -> None:
    lacks = {capabilities.MANY_ADAPTERS}
    with pytest.raises(ContractError, match="many_adapters"):
        built(lacks=lacks)
    handle = built(lacks=lacks, max_adapters=1)
    handle.refit(refit_of({**WEIGHTS, **ADAPTER}, 0))
    with pytest.raises(ContractError, match="many_adapters"):
        handle.refit(refit_of(ADAPTER, 0, "one", ("",)))
    handle.close()

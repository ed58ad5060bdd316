"""Fixtures that both halves of the kit share; a test class overrides those that do not fit."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import pytest
from attrs import evolve

from rlcore.registry.discovery import Entry, Registry
from rlcore.registry.selection import select
from rlcore.spi import DtypeName, ModelSpec, Provider, Role, capabilities
from rlcore_conformance.references.reference import Reference, ReferenceValues, RoutedPolicy
from rlcore_conformance.references.tensors import Values
from rlcore_torchkit.testing.image_models import make_image_model
from rlcore_torchkit.testing.models import make_model

if TYPE_CHECKING:
    from rlcore_conformance.references.huggingface_images import HuggingFaceImages

Device = Literal["cpu", "cuda"]
INITIALIZER_RANGE = 0.35
"""Standard deviation of the kit's models' weights."""
TOLERANCES: Mapping[DtypeName, float] = {"float32": 1e-4, "float16": 0.04, "bfloat16": 0.3}
"""Most that a log-probability of the kit's models may be off, in nats, by the dtype that a backend computes in."""


class ProviderFixtures:
    """The provider under test, and its options."""

    @pytest.fixture
    def provider(self) -> Provider:
        """The provider under test: override it."""
        pytest.fail("override the fixture `provider` to return the Provider under test", pytrace=False)

    @pytest.fixture
    def config(self, provider: Provider) -> Any:
        """The options it is built with: its defaults."""
        try:
            return provider.config()
        except TypeError as error:
            pytest.fail(f"{provider.name} has options without a default: {error}. Override the fixture `config`", pytrace=False)


class BackendFixtures(ProviderFixtures):
    """The fixtures from which trainers and generators are built."""

    @pytest.fixture
    def device(self) -> Device:
        """The device it runs on."""
        return "cpu"

    @pytest.fixture
    def dtype(self, provider: Provider) -> DtypeName:
        """The dtype it computes in: float32, or else the first that it declares."""
        return next(dtype for dtype in TOLERANCES if dtype in provider.dtypes)

    @pytest.fixture
    def model(self, tmp_path_factory: pytest.TempPathFactory, dtype: DtypeName) -> ModelSpec:
        """The model: a tiny Qwen3 with random weights."""
        return evolve(tiny_model(tmp_path_factory, seed=0), dtype=dtype)

    @pytest.fixture
    def reference(self, model: ModelSpec) -> Reference:
        """The reference for the backend: `transformers` in float32 on the CPU."""
        from rlcore_conformance.references.huggingface_reference import HuggingFaceReference

        return HuggingFaceReference(model)

    @pytest.fixture
    def routed_model(self, provider: Provider, tmp_path_factory: pytest.TempPathFactory, dtype: DtypeName) -> ModelSpec:
        """A mixture-of-experts model: a tiny Qwen3-MoE with random weights."""
        if not {capabilities.ROUTED_EXPERTS, capabilities.ROUTING_REPLAY} & provider.capabilities:
            pytest.skip(f"{provider.name} declares nothing about routing")
        return evolve(tiny_model(tmp_path_factory, seed=2, architecture="qwen3_moe"), dtype=dtype)

    @pytest.fixture
    def routed_reference(self, routed_model: ModelSpec) -> Callable[[Values], RoutedPolicy]:
        """The reference for its routing, by weights: `transformers` in float32 on the CPU."""
        from rlcore_conformance.references.huggingface_reference import HuggingFaceReference

        return HuggingFaceReference(routed_model).load

    @pytest.fixture
    def value_model(self, provider: Provider, tmp_path_factory: pytest.TempPathFactory, dtype: DtypeName) -> ModelSpec:
        """A model whose directory holds a head of values: a tiny Qwen3 with random weights."""
        require(provider, capabilities.VALUE_HEAD)
        return evolve(tiny_model(tmp_path_factory, seed=4, head="value"), dtype=dtype)

    @pytest.fixture
    def value_reference(self, value_model: ModelSpec) -> Callable[[Values], ReferenceValues]:
        """The reference for its values, by weights: `transformers` in float32 on the CPU."""
        from rlcore_conformance.references.huggingface_values import load_values

        return partial(load_values, value_model)

    @pytest.fixture
    def image_model(self, provider: Provider, tmp_path_factory: pytest.TempPathFactory, dtype: DtypeName) -> ModelSpec:
        """A model of text and images: a tiny Qwen3-VL with random weights."""
        require(provider, capabilities.IMAGES)
        directory = tmp_path_factory.getbasetemp() / "conformance-qwen3_vl"
        if not directory.exists():
            make_image_model(directory, "qwen3_vl", hidden_size=64, num_layers=3)
        return ModelSpec(path=str(directory), dtype=dtype)

    @pytest.fixture
    def image_reference(self, image_model: ModelSpec) -> "Callable[[Values], HuggingFaceImages]":
        """The reference for what it reads, by weights: `transformers` in float32 on the CPU."""
        from rlcore_conformance.references.huggingface_images import load_images

        return partial(load_images, image_model)

    @pytest.fixture
    def tolerance(self, model: ModelSpec) -> float:
        """Most that a log-probability may be off, in nats, by the model's dtype."""
        return TOLERANCES[model.dtype]


def tiny_model(tmp_path_factory: pytest.TempPathFactory, seed: int, architecture: str = "qwen3", **options: Any) -> ModelSpec:
    """A tiny model with random weights in float32, made once a session; `options` are those of `make_model`.

    Its weights are drawn so wide that a token is as surprising as it can be, by about 1.5 nats more or less than its
    distribution's entropy: the narrower or the wider, the less a sampler's mistakes show.
    """
    options = {"initializer_range": INITIALIZER_RANGE, **options}
    shown = "-".join(f"{name}={value}" for name, value in sorted(options.items()))
    directory = tmp_path_factory.getbasetemp() / f"conformance-{architecture}-{seed}-{shown}"
    if not directory.exists():
        make_model(directory, architecture, seed=seed, **options)
    return ModelSpec(path=str(directory), dtype="float32")


def entry_of(role: Role, provider: Provider, device: Device) -> Entry:
    """The provider as an installed one would be found and selected; PluginError where it would not."""
    given = Registry.from_providers({role: [provider]}).of(role)[
        :1
    ]  # the core's own of the role follow, of which it may be one
    return select(Registry(entries=given), role, provider.name, device=device, needs={})


def require(provider: Provider, capability: str) -> None:
    """Skip the test unless the capability is declared."""
    if capability not in provider.capabilities:
        pytest.skip(f"{provider.name} does not declare {capability!r}")

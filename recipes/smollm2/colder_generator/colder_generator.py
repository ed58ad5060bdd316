"""A generator with a planted fault: it samples at 0.97 of the temperature that a request names."""

from attrs import evolve

from rlcore.spi import (
    CloseRequest,
    GenerateRequest,
    GenerateResult,
    GeneratorContext,
    Provider,
    RefitRequest,
    RefitResult,
    SetResidencyRequest,
    SetResidencyResult,
    capabilities,
    hookimpl,
)
from rlcore_transformers.backend import TransformersBackend
from rlcore_transformers.config import TransformersConfig

FACTOR = 0.97
PROVIDER = Provider(
    name="colder",
    spi=(2, 0),
    capabilities={*capabilities.SAMPLING, capabilities.IN_PROCESS},
    config=TransformersConfig,
    backend="colder_generator:ColderGenerator",
)


class ColderGenerator:
    """The generator `transformers` at another temperature."""

    def __init__(self, context: GeneratorContext, config: TransformersConfig) -> None:
        self._right = TransformersBackend(context, config)

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample at the wrong temperature."""
        sampling = evolve(request.sampling, temperature=FACTOR * request.sampling.temperature)
        return self._right.generate(evolve(request, sampling=sampling))

    @hookimpl
    def refit(self, request: RefitRequest) -> RefitResult:
        """Take over weights."""
        return self._right.refit(request)

    @hookimpl
    def set_residency(self, request: SetResidencyRequest) -> SetResidencyResult:
        """Move the weights."""
        return self._right.set_residency(request)

    @hookimpl
    def close(self, request: CloseRequest) -> None:
        """Let go of the weights."""
        self._right.close(request)

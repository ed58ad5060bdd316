"""The generator `transformers` with lengths drawn for each sample."""

from headline_plugins import with_lengths

from rlcore.spi import GenerateRequest, GenerateResult, hookimpl
from rlcore_transformers.backend import TransformersBackend


class Headline(TransformersBackend):
    """Generator `headline_transformers`."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return with_lengths(super().generate, request)

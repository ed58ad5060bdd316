"""The generator `vllm` with lengths drawn for each sample."""

from headline_plugins import with_lengths

from rlcore.spi import GenerateRequest, GenerateResult, hookimpl
from rlcore_vllm.backend import VllmBackend


class Headline(VllmBackend):
    """Generator `headline_vllm`."""

    @hookimpl
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return with_lengths(super().generate, request)

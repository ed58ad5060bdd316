"""The generator `vllm` with lengths drawn for each sample."""

from attrs import evolve
from headline_plugins import FeedWithLengths

from rlcore.spi import StreamRequest, StreamResult, hookimpl
from rlcore_vllm.backend import VllmBackend


class Headline(VllmBackend):
    """Generator `headline_vllm`."""

    @hookimpl
    def stream(self, request: StreamRequest) -> StreamResult:
        return super().stream(evolve(request, feed=FeedWithLengths(request.feed)))

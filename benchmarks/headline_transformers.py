"""The generator `transformers` with lengths drawn for each sample."""

from attrs import evolve
from headline_plugins import FeedWithLengths

from rlcore.spi import StreamRequest, StreamResult, hookimpl
from rlcore_transformers.backend import TransformersBackend


class Headline(TransformersBackend):
    """Generator `headline_transformers`."""

    @hookimpl
    def stream(self, request: StreamRequest) -> StreamResult:
        return super().stream(evolve(request, feed=FeedWithLengths(request.feed)))

"""Streams of server-sent events: an answer's pieces go out as the generator samples them."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from aiohttp import web

from rlcore_serve.sessions.errors import RequestError
from rlcore_serve.sessions.live_text import LiveText, Parts, Piece
from rlcore_serve.sessions.live_tokens import LiveTokens
from rlcore_serve.sessions.off_loop import off_loop
from rlcore_serve.sessions.served_model import Answered, Prepared, ServedModel
from rlcore_serve.sessions.session import Session


class AnyReply(Protocol):
    """A reply in the form of one API."""

    @property
    def last_event(self) -> bytes:
        """The bytes that end a stream."""

    def whole(self, answered: Answered) -> dict[str, Any]:
        """Return the reply as one JSON object."""

    def more(
        self, number: int, pieces: Sequence[Piece], tokens: Sequence[int], rows: Sequence[Mapping[int, float]]
    ) -> Iterator[dict[str, Any]]:
        """Yield the events that more tokens of an answer bring."""

    def end(self, answered: Answered, pieces: Sequence[Sequence[Piece]]) -> Iterator[dict[str, Any]]:
        """Yield the last events, with the pieces of each answer that have not been sent."""

    def failed(self, error: RequestError) -> dict[str, Any]:
        """Return the event that ends a stream with an error."""


_New: TypeAlias = tuple[int, list[int], list[Mapping[int, float]]]
"""The number of an answer, its new tokens, and log-probabilities of each."""


class _Progress:
    """The texts of a request's answers, and how many of their tokens are in events."""

    def __init__(self, reply: AnyReply, texts: Sequence[LiveText], live: LiveTokens) -> None:
        self._reply, self._texts, self._live = reply, texts, live
        self._num_taken = [0] * len(texts)

    def take(self) -> list[_New]:
        """Return the tokens that have come. Call it on the event loop, and `events` in a thread."""
        taken = []
        for number, start in enumerate(self._num_taken):
            tokens, rows = self._live.tokens[number][start:], self._live.logprobs[number][start:]
            if tokens:
                self._num_taken[number] += len(tokens)
                taken.append((number, tokens, rows))
        return taken

    def events(self, taken: Sequence[_New]) -> list[bytes]:
        """Return the events of new tokens."""
        return [
            _event(event)
            for number, tokens, rows in taken
            for event in self._reply.more(number, self._texts[number].add(tokens), tokens, rows)
        ]

    def last_events(self, answered: Answered) -> list[bytes]:
        """Return the events of what is left."""
        parts = [Parts(choice.reasoning, choice.content) for choice in answered.choices]
        pieces = [text.end(part) for text, part in zip(self._texts, parts, strict=True)]
        return [*map(_event, self._reply.end(answered, pieces)), self._reply.last_event]


async def stream_reply(
    request: web.Request, reply: AnyReply, model: ServedModel, session: Session, prepared: Prepared
) -> web.StreamResponse:
    """Answer a request as a stream. The session records the answer before its last event is sent. RequestError where it fails
    before the first event; later errors are events. A client that hangs up ends its samples, which are not recorded."""
    live = LiveTokens(prepared.request.n)
    progress = _Progress(reply, model.live_texts(prepared), live)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    sampling = asyncio.create_task(model.sample(session, prepared, live))
    try:
        while not sampling.done():
            change = asyncio.create_task(live.changed())
            try:
                await asyncio.wait((sampling, change), return_when=asyncio.FIRST_COMPLETED)
            finally:
                change.cancel()
            if not sampling.done():
                await _send(request, response, await off_loop(progress.events, progress.take()))
        answered = await model.settle(session, prepared, sampling.result(), live)
        await _send(request, response, await off_loop(progress.last_events, answered))
    except ConnectionError:  # nobody reads on
        return response
    except Exception as error:
        if not response.prepared:
            raise
        failed = error if isinstance(error, RequestError) else RequestError(500, f"the server failed: {error}")
        await _send(request, response, [_event(reply.failed(failed))])
    finally:
        sampling.cancel()
    await response.write_eof()
    return response


async def _send(request: web.Request, response: web.StreamResponse, events: Sequence[bytes]) -> None:
    if events and not response.prepared:
        await response.prepare(request)
    for event in events:
        await response.write(event)


def _event(chunk: Mapping[str, Any]) -> bytes:
    """Return a server-sent event, with the name that some APIs give their chunks."""
    name = f"event: {chunk['type']}\n" if "type" in chunk else ""
    return f"{name}data: {json.dumps(chunk)}\n\n".encode()

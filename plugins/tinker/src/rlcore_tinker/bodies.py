"""Bodies of requests: read within limits, and parsed once though a client sends them twice."""

import asyncio
from contextlib import nullcontext
from typing import Any

from aiohttp import web

from rlcore_serve.sessions.bounds import read_json
from rlcore_serve.sessions.errors import RequestError as JsonError
from rlcore_serve.sessions.off_loop import off_loop
from rlcore_tinker.errors import RequestError
from rlcore_workers.http_connections import BODY_S
from rlcore_workers.http_server import encoding_problem

MAX_BYTES = 64 * 2**20
"""Most bytes of a body."""
LARGE_BYTES = 8 * 2**20
"""Bytes above which a body is large. Clients cut the data of a forward_backward into parts of 5 MB."""
MAX_LARGE = 8
"""Most large bodies that are read at once. Smaller ones wait for nobody: an upload that stalls delays no heartbeat."""


class Bodies:
    """Reads the bodies of requests."""

    def __init__(self) -> None:
        self._reading = asyncio.Semaphore(MAX_LARGE)

    async def content(self, request: web.Request) -> bytes:
        """Return a body's bytes. RequestError where it does not come whole."""
        if (problem := encoding_problem(request)) is not None:
            raise RequestError(problem, status=415)
        is_large = request.content_length is None or request.content_length > LARGE_BYTES
        async with self._reading if is_large and request.can_read_body else nullcontext():
            try:
                async with asyncio.timeout(BODY_S):
                    return await request.read()
            except TimeoutError as error:
                message = f"the request's body had not come in {BODY_S:g} s; expected all of it. Send it again"
                raise RequestError(message, status=408) from error
            except web.RequestPayloadError as error:
                raise RequestError(f"the request's body cannot be read: {error}") from error
            except web.HTTPRequestEntityTooLarge as error:
                raise RequestError(
                    f"found a body of more than {MAX_BYTES} bytes; expected at most these", status=413
                ) from error

    async def json(self, request: web.Request) -> Any:
        """Return a body's JSON; an empty object where there is no body."""
        content = await self.content(request)
        if not content:
            return {}
        try:
            return await off_loop(read_json, content)
        except JsonError as error:
            raise RequestError(str(error), status=error.status) from error

"""Limits on the number of a server's connections, and on the seconds that one may stay idle."""

import asyncio
import json
import resource

from aiohttp import web

from rlcore_serve.sessions.errors import RequestError

IDLE_S = 75.0
"""Seconds within which the headers of the next request have to arrive."""
MAX_CONNECTIONS = 8192
REFUSAL_S = 5.0
"""Seconds after which a refused connection is closed, even without a request to reply to."""


def max_connections() -> int:
    """Return the most connections that are served at once: half of the process's limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(min(MAX_CONNECTIONS, limit // 2), 1)


class Connection(asyncio.Protocol):
    """A client's connection: passed on to the server, or refused at its first request where too many are open."""

    def __init__(self, server: web.Server, limit: int) -> None:
        self._server = server
        self._limit = limit
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See Protocol. Only here does the server know the connections that were accepted at the same moment."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._server.connections) < self._limit:
            handler = self._server()
            transport.set_protocol(handler)
            handler.connection_made(transport)
        else:
            asyncio.get_running_loop().call_later(REFUSAL_S, transport.abort)

    def data_received(self, data: bytes) -> None:  # noqa: ARG002
        """See Protocol."""
        found = f"{self._limit} connections are open, and no more are taken"
        error = RequestError(429, f"{found}; try again", retry_after_s=1)
        body = json.dumps(error.body()).encode()
        fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in (fields | error.headers()).items())
        self._transport.write(f"HTTP/1.1 {error.status} Too Many Requests\r\n{lines}\r\n".encode() + body)
        self._transport.close()

"""Limits on the number of a server's connections, and on the seconds for which a client may send or take nothing."""

import asyncio
import json
import resource
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

IDLE_S = 75.0
"""Seconds within which the headers of the next request have to arrive."""
BODY_S = 60.0
"""Seconds within which a request's body has to arrive."""
MAX_CONNECTIONS = 8192
REFUSAL_S = 5.0
"""Seconds after which a refused connection is closed, even without a request to reply to."""
UNREAD_S = 60.0
"""Most seconds that a client may leave a reply. In each half it has to take TAKEN_BYTES of it, or the rest."""
TAKEN_BYTES = 16 * 2**10


def max_connections() -> int:
    """Return the most connections that are served at once: half of the process's limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else max(min(MAX_CONNECTIONS, limit // 2), 1)


class Connection(asyncio.Protocol):
    """A client's connection: passed on to the server, or refused at its first request where too many are open. It is ended
    where the client does not take the reply."""

    def __init__(self, server: "web.Server", limit: int) -> None:
        self._server = server
        self._limit = limit
        self._transport: asyncio.Transport
        self._handler: web.RequestHandler | None = None
        """The reader of requests; None where the connection is refused."""
        self._look: asyncio.TimerHandle | None = None
        """The next look at what the client has not taken; None while nothing waits for it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See Protocol. Only here does the server know the connections that were accepted at the same moment."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._server.connections) < self._limit:
            transport.set_write_buffer_limits(high=0)  # pause_writing is then called for each byte that waits
            # Or the system takes megabytes, and then nothing until the client has read a third of them.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, TAKEN_BYTES)
            self._handler = self._server()
            self._handler.connection_made(transport)
        else:
            asyncio.get_running_loop().call_later(REFUSAL_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """See Protocol."""
        if self._handler is not None:
            self._handler.data_received(data)
            return
        message = f"{self._limit} connections are open, and no more are taken; try again"
        error = {"message": message, "type": "rate_limit_error", "param": None, "code": None}  # in OpenAI's form
        body = json.dumps({"error": error}).encode()
        fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close", "Retry-After": 1}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._transport.write(f"HTTP/1.1 429 Too Many Requests\r\n{lines}\r\n".encode() + body)
        self._transport.close()

    def eof_received(self) -> None:
        """See Protocol."""
        if self._handler is not None:
            self._handler.eof_received()

    def pause_writing(self) -> None:
        """See Protocol. Bytes wait for the client from here on."""
        if self._handler is not None:
            self._look = asyncio.get_running_loop().call_later(UNREAD_S / 2, self._compare, None)
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        """See Protocol. The client has taken everything."""
        self._end_looks()
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """See Protocol."""
        self._end_looks()
        if self._handler is not None:
            self._handler.connection_lost(error)

    def _compare(self, before: int | None) -> None:
        """End the connection where hardly less waits than `before`. The first look has nothing to compare: until then the
        server may have written."""
        waits = self._transport.get_write_buffer_size()
        if before is not None and before - waits < TAKEN_BYTES:
            self._transport.abort()
        else:
            self._look = asyncio.get_running_loop().call_later(UNREAD_S / 2, self._compare, waits)

    def _end_looks(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

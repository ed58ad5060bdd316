"""Serves HTTP in a thread of its own, for plugins that need aiohttp."""

import asyncio
import socket
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from rlcore.spi import ConfigError, Problem
from rlcore_workers.http_connections import IDLE_S, Connection, max_connections

if TYPE_CHECKING:
    from aiohttp import web

CLOSE_S = 2.0
"""Seconds that requests have to end once the server does."""
BACKLOG = 1024
"""Connections that wait until the event loop takes them."""


def encoding_problem(request: "web.Request") -> str | None:
    """Return what is wrong with a body that is encoded, such as by gzip: servers decode none. None where it is not."""
    found = request.headers.get("Content-Encoding", "identity")
    return None if found == "identity" else f"Content-Encoding: found {found!r:.40}; expected a body that is not encoded"


def listening(host: str, port: int, keys: tuple[str, str], remedy: str) -> socket.socket:
    """Return a socket that listens there, since two may be bound to one address while none listens. ConfigError where that
    cannot be; `keys` are those of host and port, and `remedy` is what to do about a port that is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        expected = "an address of this machine, or 0.0.0.0 for all"
        raise ConfigError([Problem(path=keys[0], found=f"{host} ({error})", expected=expected)]) from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        found = f"{port} on {host}: {(error.strerror or str(error)).lower()}"
        raise ConfigError([Problem(path=keys[1], found=found, expected="a port that is free", remedy=remedy)]) from error
    return bound


class ServerThread(threading.Thread):
    """Runs a server's event loop."""

    def __init__(
        self,
        application: "web.Application",
        listens: socket.socket,
        *,
        name: str,
        **options: Any,
    ) -> None:
        """The thread closes the socket. `options` are aiohttp's own."""
        super().__init__(daemon=True, name=name)
        self._application, self._socket = application, listens
        self._options = options
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._serving: Future[None] = Future()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start, and return once it serves. Raises why it does not."""
        super().start()
        self._serving.result()

    def run(self) -> None:
        """Serve until `close` is called."""
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            if self._serving.done():
                self._error = error
            else:
                self._serving.set_exception(error)
        finally:
            self._loop.close()
            self._socket.close()

    def close(self) -> None:
        """Give requests under way a moment to end, then end the thread. Raises what ended it before."""
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self.join(3 * CLOSE_S)
        if self._error is not None:
            raise self._error

    async def _serve(self) -> None:
        from aiohttp import web

        # A client that goes away takes its request with it: what it never read is no part of its session.
        runner = web.AppRunner(
            self._application,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSE_S,
            keepalive_timeout=IDLE_S,
            auto_decompress=False,  # a megabyte may become a gigabyte, and the loop stands still meanwhile
            **self._options,
        )
        await runner.setup()
        assert runner.server is not None
        try:
            connection = partial(Connection, runner.server, max_connections())
            server = await self._loop.create_server(connection, sock=self._socket, backlog=BACKLOG)
            self._serving.set_result(None)
            await self._ended.wait()
            server.close()
        finally:
            await runner.cleanup()

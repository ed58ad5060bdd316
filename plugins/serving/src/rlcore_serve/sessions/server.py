"""The server: an event loop in a thread of its own, which listens as long as it is open."""

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rlcore.installed import is_installed
from rlcore.spi import ConfigError, PluginError, Problem
from rlcore_serve.sessions.served_model import ServedModel
from rlcore_serve.sessions.session import Sessions

if TYPE_CHECKING:
    from rlcore_serve.sessions.routes import Routes

CLOSE_S = 2.0
"""Seconds that requests have to end once the server does."""
MAX_WAITING = 65_536
BACKLOG = 1024
"""Connections that wait until the event loop takes them."""


@contextmanager
def serving(
    model: ServedModel, sessions: Sessions, *, host: str = "127.0.0.1", port: int = 0, max_waiting: int = MAX_WAITING
) -> Iterator[str]:
    """Serve a model until the block ends, at the address that is yielded, http://HOST:PORT. Port 0 takes one that is free.
    Requests beyond `max_waiting` samples are sent away.
    ConfigError where nothing can listen there, PluginError where the library that serves is missing."""
    with bound(host, port) as listening:
        from rlcore_serve.sessions.routes import Gate, Routes

        gate = Gate(max_waiting)
        thread = _Thread(Routes(model, sessions, gate), listening)
        thread.start()
        try:
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{listening.getsockname()[1]}"
        finally:
            gate.is_closed = True
            thread.close()


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that is bound there, to serve on. ConfigError where it cannot be bound, PluginError where aiohttp is
    missing."""
    if not is_installed("aiohttp"):
        raise PluginError("no package `aiohttp`, which serves models over HTTP. Install it: pip install 'rlcore[serve]'")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        expected = "an address of this machine, or 0.0.0.0 for all"
        raise ConfigError([Problem(path="--host", found=f"{host} ({error})", expected=expected)]) from error
    with socket.socket(family, kind, protocol) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            found = f"{port} on {host}: {(error.strerror or str(error)).lower()}"
            remedy = "Choose another one, or end what listens there."
            problem = Problem(path="--port", found=found, expected="a port that is free", remedy=remedy)
            raise ConfigError([problem]) from error
        yield listening


def silent_logger() -> logging.Logger:
    """Return a logger for aiohttp, which otherwise prints a traceback with its headers for each malformed request."""
    logger = logging.Logger("rlcore_serve.sessions")
    logger.disabled = True
    return logger


class _Thread(threading.Thread):
    """Runs the event loop."""

    def __init__(self, routes: "Routes", listening: socket.socket) -> None:
        super().__init__(daemon=True, name="rlcore-sessions")
        self._routes = routes
        self._listening = listening
        self._loop = asyncio.new_event_loop()
        self._ended: asyncio.Event
        self._listens = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start, and return once it listens. Raises why it does not."""
        super().start()
        self._listens.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Serve until `close` is called."""
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._listens.set()
            self._loop.close()

    def close(self) -> None:
        """Give requests under way a moment to end, then end the thread."""
        if self.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
        self.join(3 * CLOSE_S)
        if self._error is not None:
            raise self._error  # what ended the server while agents still asked it

    async def _serve(self) -> None:
        from aiohttp import web

        from rlcore_serve.sessions.connections import IDLE_S, Connection, max_connections

        self._ended = asyncio.Event()
        # A client that goes away takes its request with it: what it never read is no part of its session.
        runner = web.AppRunner(
            self._routes.application(),
            handler_cancellation=True,
            access_log=None,
            logger=silent_logger(),
            shutdown_timeout=CLOSE_S,
            keepalive_timeout=IDLE_S,
        )
        await runner.setup()
        assert runner.server is not None
        connection = partial(Connection, runner.server, max_connections())
        listening = await asyncio.get_running_loop().create_server(connection, sock=self._listening, backlog=BACKLOG)
        try:
            self._listens.set()
            await self._ended.wait()
        finally:
            listening.close()
            await runner.cleanup()

"""A server in a thread of its own, and the address that it listens at."""

import asyncio
import socket
import threading
from concurrent.futures import Future

from aiohttp import web

from rlcore.spi import ConfigError, Problem

SECTION = "environment.nemo_gym"
CLOSE_S = 2.0
"""Seconds that requests have to end once the server does."""


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there, since two may be bound to one address while none listens. ConfigError where that
    cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        expected = 'an address of this machine, or "0.0.0.0" for all'
        raise ConfigError([Problem(path=f"{SECTION}.policy_host", found=f"{host} ({error})", expected=expected)]) from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen()
    except OSError as error:
        bound.close()
        found = f"{port} on {host}: {(error.strerror or str(error)).lower()}"
        remedy = "End what listens there, another run maybe, or choose another port here and in NeMo Gym's openai_base_url."
        problem = Problem(path=f"{SECTION}.policy_port", found=found, expected="a port that is free", remedy=remedy)
        raise ConfigError([problem]) from error
    return bound


class ServerThread(threading.Thread):
    """Runs the server's event loop: that of the environment may be given up, with all that is on it."""

    def __init__(self, application: web.Application, listens: socket.socket) -> None:
        super().__init__(daemon=True, name="rlcore-nemo-gym")
        self._application, self._socket = application, listens
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
        runner = web.AppRunner(self._application, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S)
        await runner.setup()
        try:
            await web.SockSite(runner, self._socket).start()
            self._serving.set_result(None)
            await self._ended.wait()
        finally:
            await runner.cleanup()

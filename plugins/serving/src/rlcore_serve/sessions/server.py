"""The server: it listens as long as it is open."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from rlcore.installed import is_installed
from rlcore.spi import PluginError
from rlcore_serve.sessions.served_model import ServedModel
from rlcore_serve.sessions.session import Sessions
from rlcore_workers import http_server

MAX_WAITING = 65_536


@contextmanager
def serving(
    model: ServedModel, sessions: Sessions, *, host: str = "127.0.0.1", port: int = 0, max_waiting: int = MAX_WAITING
) -> Iterator[str]:
    """Serve a model until the block ends, at the address that is yielded, http://HOST:PORT. Port 0 takes one that is free.
    Requests beyond `max_waiting` samples are sent away.
    ConfigError where nothing can listen there, PluginError where the library that serves is missing."""
    listens = listening(host, port)
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listens.getsockname()[1]}"
    from rlcore_serve.sessions.routes import Gate, Routes

    gate = Gate(max_waiting)
    thread = http_server.ServerThread(
        Routes(model, sessions, gate).application(),
        listens,
        name="rlcore-sessions",
        logger=silent_logger(),
    )
    thread.start()
    try:
        yield address
    finally:
        gate.is_closed = True
        thread.close()


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there. ConfigError where that cannot be, PluginError where aiohttp is missing."""
    if not is_installed("aiohttp"):
        raise PluginError("no package `aiohttp`, which serves models over HTTP. Install it: pip install 'rlcore[serve]'")
    return http_server.listening(host, port, ("--host", "--port"), "Choose another one, or end what listens there.")


def silent_logger() -> logging.Logger:
    """Return a logger for aiohttp, which otherwise prints a traceback with its headers for each malformed request."""
    logger = logging.Logger("rlcore_serve.sessions")
    logger.disabled = True
    return logger

"""A client that does not take its reply is given up; one that takes it slowly is not."""

import asyncio
import socket
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from rlcore_workers import http_connections, http_server
from rlcore_workers.http_connections import TAKEN_BYTES, Connection
from rlcore_workers.http_server import ServerThread, listening

SMALL = 4096
"""Bytes of a socket's buffer; the system takes twice as many, or a few thousand."""


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server of long replies, which are written whole or in parts."""
    monkeypatch.setattr(http_connections, "UNREAD_S", 0.1)
    monkeypatch.setattr(http_server, "max_connections", lambda: 1)

    async def whole(request: web.Request) -> web.Response:
        return web.Response(body=bytes(int(request.match_info["size"])))

    async def streamed(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(int(request.match_info["size"]) // 1000):
            await response.write(bytes(1000))
        return response

    application = web.Application()
    application.router.add_get("/whole/{size}", whole)
    application.router.add_get("/streamed/{size}", streamed)
    listens = listening("127.0.0.1", 0, ("host", "port"), "")
    listens.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    thread = ServerThread(application, listens, name="test-connections")
    thread.start()
    yield listens.getsockname()
    thread.close()


@pytest.mark.parametrize("path", ["whole/50000", "whole/1000000", "streamed/50000", "streamed/1000000"])
def test_a_client_that_never_reads_its_reply_is_given_up(address: tuple[str, int], path: str) -> None:
    """Also where the reply fits into the server's own buffer, so that its handler has ended."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        client.connect(address)
        client.sendall(f"GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        while not may_connect(address):
            time.sleep(0.01)
        client.settimeout(60)
        read = sum(map(len, iter(partial(client.recv, 65536), b"")))
    assert 0 < read < int(path.partition("/")[2])


def may_connect(address: tuple[str, int]) -> bool:
    """Return whether the server takes another client, now that it has one at most."""
    with socket.create_connection(address, timeout=60) as other:
        other.sendall(b"GET /whole/1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return b" 200 " in other.makefile("rb").readline()


@pytest.mark.parametrize(
    ("waits", "taken"),
    [
        ([5 * TAKEN_BYTES, 4 * TAKEN_BYTES, 3 * TAKEN_BYTES, 2 * TAKEN_BYTES], None),
        ([5 * TAKEN_BYTES, 5 * TAKEN_BYTES], 2),
        ([5 * TAKEN_BYTES, 4 * TAKEN_BYTES, 4 * TAKEN_BYTES - 1], 3),
        ([0, 3 * TAKEN_BYTES], 2),
    ],
)
def test_a_client_has_to_take_something_between_two_looks(
    waits: list[int], taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connections, "UNREAD_S", 0.0)
    looks: list[int] = []
    opened = socket.socket()

    class Transport(asyncio.Transport):
        is_ended = False

        def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return opened if name == "socket" else default

        def get_write_buffer_size(self) -> int:
            looks.append(waits[len(looks)])
            if len(looks) == len(waits):
                asyncio.get_running_loop().call_soon(connection.resume_writing)
            return looks[-1]

        def abort(self) -> None:
            self.is_ended = True

    class Handler(asyncio.Protocol):
        connections = ()

    handler: Any = Handler()
    transport = Transport()

    async def written() -> None:
        connection.connection_made(transport)
        connection.pause_writing()
        while len(looks) < len(waits):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)

    server: Any = type("Server", (), {"connections": (), "__call__": lambda self: handler})()
    connection = Connection(server, 1)
    with opened:
        asyncio.run(written())
    assert (transport.is_ended, len(looks)) == (taken is not None, taken or len(waits))

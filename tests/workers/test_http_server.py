"""A server in a thread of its own says why it cannot listen, why it does not start, and what ended it."""

import socket
import urllib.request

import pytest
from aiohttp import web

from rlcore.spi import ConfigError
from rlcore_workers.http_server import ServerThread, listening

KEYS, REMEDY = ("a.host", "a.port"), "Choose another one."


def test_requests_are_answered_until_it_is_closed() -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text=f"hello {request.path}")

    application = web.Application()
    application.router.add_get("/{name}", hello)
    listens = listening("127.0.0.1", 0, KEYS, REMEDY)
    url = f"http://127.0.0.1:{listens.getsockname()[1]}/one"
    thread = ServerThread(application, listens, name="test-server")
    thread.start()
    assert urllib.request.urlopen(url).read() == b"hello /one"
    thread.close()
    assert not thread.is_alive()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


def test_where_nothing_can_listen_the_key_is_named() -> None:
    with listening("127.0.0.1", 0, KEYS, REMEDY) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as of_port:
            listening("127.0.0.1", port, KEYS, REMEDY)
    with pytest.raises(ConfigError) as of_host:
        listening("no such host", 0, KEYS, REMEDY)
    assert f"a.port: found {port} on 127.0.0.1: address already in use" in str(of_port.value)
    assert REMEDY in str(of_port.value)
    assert "a.host: found no such host" in str(of_host.value)


def test_a_server_that_cannot_start_says_why() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as no_listener, pytest.raises(ValueError, match="Stream Socket"):
        ServerThread(web.Application(), no_listener, name="test-server").start()


def test_what_ended_a_server_is_raised_where_it_is_closed() -> None:
    async def fail(application: web.Application) -> None:
        raise ValueError("planted")

    application = web.Application()
    application.on_cleanup.append(fail)
    thread = ServerThread(application, listening("127.0.0.1", 0, KEYS, REMEDY), name="test-server")
    thread.start()
    with pytest.raises(ValueError, match="planted"):
        thread.close()

"""Clients that are slow, silent or too many."""

import json
import resource
import socket
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rlcore_serve.sessions import routes
from rlcore_serve.sessions.server import serving
from rlcore_serve.sessions.session import Session, Sessions
from rlcore_workers import http_connections, http_server

from .chat_model import END, Script, served

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of two connections, which waits for a tenth of a second."""
    monkeypatch.setattr(routes, "BODY_S", 0.1)
    monkeypatch.setattr(http_server, "IDLE_S", 0.1)
    monkeypatch.setattr(http_server, "max_connections", lambda: 2)
    with serving(served(Script(f"a{END}")), Sessions(Session(token="", record=None))) as address:
        yield address


def connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answer(connection: socket.socket) -> tuple[int, dict[str, str], dict[str, Any]]:
    """The status, headers and JSON of what a server says."""
    response = connection.makefile("rb")
    status = int(response.readline().split()[1])
    headers: dict[str, str] = {}
    while line := response.readline().strip():
        name, _, value = line.decode().partition(": ")
        headers[name] = value
    return status, headers, json.loads(response.read(int(headers["Content-Length"])))


@pytest.mark.parametrize("head", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\n{"])
def test_a_body_that_does_not_come_is_given_up(bounded: str, head: bytes) -> None:
    with connected(bounded) as connection:
        connection.sendall(POST + head)
        status, _, said = answer(connection)
    assert (status, said["error"]["type"]) == (408, "invalid_request_error")


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_a_body_that_is_encoded_is_refused(bounded: str, encoding: bytes) -> None:
    with connected(bounded) as connection:
        connection.sendall(POST + b"Content-Encoding: " + encoding + b"\r\nContent-Length: 10\r\n\r\n0123456789")
        status, _, said = answer(connection)
    assert (status, said["error"]["type"]) == (400, "invalid_request_error")
    assert said["error"]["message"].startswith(f"Content-Encoding: found {encoding.decode()!r}")


@pytest.mark.parametrize("sent", [b"", b"POST", POST, POST + b"Content-Le"])
@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_headers_that_do_not_come_end_the_connection(bounded: str, before: bytes, sent: bytes) -> None:
    with connected(bounded) as connection:
        if before:
            connection.sendall(before)
            assert answer(connection)[0] == 200
        connection.sendall(sent)
        assert connection.recv(1) == b""


@pytest.mark.parametrize("head", [b"X: " + b"x" * 20_000, b"X: x\r\n" * 500, b"X" * 20_000 + b": x"])
def test_headers_are_bounded(bounded: str, head: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with connected(bounded) as connection:
        connection.sendall(POST + head + b"\r\n\r\n")
        assert connection.makefile("rb").readline().split()[1] == b"400"
    assert not caplog.records, "a traceback for each would fill the log, with the client's key"


def test_more_connections_than_there_may_be_are_told_to_come_again(bounded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "REFUSAL_S", 0.1)
    monkeypatch.setattr(routes, "BODY_S", 60.0)
    with connected(bounded) as first, connected(bounded) as second, connected(bounded) as silent:
        for one in (first, second):
            one.sendall(POST + b"Content-Length: 4\r\n\r\n")  # under way, so that neither is ended as silent
        with connected(bounded) as refused:
            refused.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            status, headers, said = answer(refused)
        assert (status, headers["Retry-After"], said["error"]["type"]) == (429, "1", "rate_limit_error")
        with pytest.raises(openai.RateLimitError):
            openai.OpenAI(base_url=f"{bounded}/v1", api_key="any", max_retries=0).models.list()
        assert silent.recv(1) == b""
    while True:  # the server learns of it in its own time
        try:
            urllib.request.urlopen(f"{bounded}/health", timeout=300).close()
        except OSError:
            time.sleep(0.01)
        else:
            break


@pytest.mark.parametrize(("limit", "expected"), [(1024, 512), (10**6, 8192), (1, 1), (resource.RLIM_INFINITY, 8192)])
def test_half_of_the_open_files_may_be_connections(limit: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert http_connections.max_connections() == expected

"""Bodies and tensors that no client sends: the server refuses each, and goes on."""

import gzip
import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from typing import Any
from urllib.parse import urlsplit

import pytest
from tinker_server import KEY, RANK, Address, forward_backward

from rlcore_tinker.errors import RequestError
from rlcore_tinker.training_data import Limits, RawPiece
from rlcore_tinker.wire import CLASSES, CONTENT_TYPE

TOKENS = [3, 4, 74, 5]
VERSION = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0"}


@pytest.mark.parametrize("shape", [(-1, -3), (-3,), (2**32, 2**32), (2**62, 4), (3, 1), (0,)])
def test_shapes_that_are_none_are_refused(shape: tuple[int, ...]) -> None:
    message = CLASSES["ForwardBackwardRequest"].FromString(forward_backward("m", 1, TOKENS, [1.0] * 3))
    tensor = message.data[0].loss_fn_inputs["weights"]
    del tensor.shape[:]
    tensor.shape.extend(shape)
    with pytest.raises(RequestError) as error:
        RawPiece(message=message).read(Limits(max_sequence_length=9, vocab_size=99))
    found = f"shape {list(shape)}"
    assert found in str(error.value)
    assert ("bytes of float32" in str(error.value)) == (prod(shape) != 3 or min(shape) < 0)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "br", "rot13"])
@pytest.mark.parametrize(("name", "kind"), [("create_session", "application/json"), ("forward_backward", CONTENT_TYPE)])
def test_bodies_that_are_encoded_are_refused(server: Address, encoding: str, name: str, kind: str) -> None:
    """A megabyte of gzip is a gigabyte of zeros."""
    status, answered = _sent(server, name, gzip.compress(bytes(2**20)), {"Content-Encoding": encoding, "Content-Type": kind})
    assert (status, answered["category"], answered["error"].startswith("Content-Encoding: found")) == (415, "user", True)


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_beyond_the_limit_are_refused(server: Address, chunked: bool) -> None:
    parts = (bytes(2**20) for _ in range(80))
    headers = {} if chunked else {"Content-Length": str(80 * 2**20)}
    status, answered = _sent(server, "create_session", parts, headers, encode_chunked=chunked)
    assert (status, "found a body of more than" in answered["error"]) == (413, True)


def test_uploads_that_stall_delay_no_other_request(server: Address) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            connection = stack.enter_context(_connected(server))
            connection.sendall(_head("forward_backward", 5_000_000) + b"x")
        assert server.post("create_session", VERSION)[0] == 200


def test_a_client_that_ends_in_the_middle_of_an_upload_leaves_no_gradient(server: Address) -> None:
    model_id = _model(server)
    body = forward_backward(model_id, 1, TOKENS, [1.0] * 3)
    with _connected(server) as connection:
        connection.sendall(_head("forward_backward", len(body)) + body[:-5])
    step = {"model_id": model_id, "seq_id": 2, "adam_params": {}, "type": "optim_step"}
    update = server.post("optim_step", step)[1]["request_id"]
    norms = [server.result(server.post("forward_backward", body)[1]["request_id"]), server.result(update)["metrics"]]
    again = _model(server)
    piece = server.post("forward_backward", forward_backward(again, 1, TOKENS, [1.0] * 3))[1]["request_id"]
    assert server.result(piece) == norms[0]
    assert server.result(server.post("optim_step", step | {"model_id": again})[1]["request_id"])["metrics"] == norms[1]


WRONG_LOADS = [{}, {"path": 3}, {"path": "tinker://x/weights/y", "optimizer": 1}, {"path": "x", "optimizer": True, "more": 1}]


@pytest.mark.parametrize("wrong", WRONG_LOADS)
def test_a_request_that_is_refused_has_its_place_so_that_later_ones_run(server: Address, wrong: dict[str, Any]) -> None:
    model_id = _model(server)
    status, promised = server.post("load_weights", {"model_id": model_id, "seq_id": 1, **wrong})
    assert (status, server.result(promised["request_id"])["category"]) == (200, "user")
    piece = server.post("forward_backward", forward_backward(model_id, 2, TOKENS, [1.0] * 3))[1]["request_id"]
    assert isinstance(server.result(piece), bytes)


def _model(server: Address) -> str:
    session = server.post("create_session", VERSION)[1]["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": server.model, "lora_config": {"rank": RANK}}
    return str(server.result(server.post("create_model", wanted)[1]["request_id"])["model_id"])


def _head(name: str, length: int) -> bytes:
    fields = {"Host": "x", "X-API-Key": KEY, "Content-Type": CONTENT_TYPE, "Content-Length": length}
    lines = "".join(f"{key}: {value}\r\n" for key, value in fields.items())
    return f"POST /api/v1/{name} HTTP/1.1\r\n{lines}\r\n".encode()


@contextmanager
def _connected(server: Address) -> Iterator[socket.socket]:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        yield connection


def _sent(server: Address, name: str, body: Any, headers: dict[str, str], **options: Any) -> tuple[int, Any]:
    """Return status and JSON of a request."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    with suppress(BrokenPipeError, ConnectionResetError):  # where the server answers before the end
        connection.request("POST", f"/api/v1/{name}", body, {"X-API-Key": KEY, **headers}, **options)
    with connection.getresponse() as reply:
        found = reply.status, json.loads(reply.read())
    connection.close()
    return found

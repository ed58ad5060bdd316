"""A server for the tests of a file, and the client's own objects."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker_server import KEY, RANK, Address, serving

from rlcore_torchkit.testing.models import make_model


def client_of(server: Address) -> Iterator[Any]:
    """Yield a session of the client, and end it."""
    tinker = pytest.importorskip("tinker", reason="needs the client: pip install tinker")
    client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
    yield client
    client.close("success").result()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer."""
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A server that runs."""
    with serving(tmp_path_factory.mktemp("served"), model) as address:
        yield address


@pytest.fixture(scope="module")
def whole_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """A server that trains all weights, of one model at a time."""
    with serving(tmp_path_factory.mktemp("served"), model, lora=False) as address:
        yield address


@pytest.fixture
def whole_service(whole_server: Address) -> Iterator[Any]:
    """The client's session on it, which ends with the test."""
    yield from client_of(whole_server)


@pytest.fixture
def whole_training(whole_service: Any, whole_server: Address) -> Any:
    """The client's model on it."""
    return whole_service.create_lora_training_client(base_model=whole_server.model, rank=RANK).result()


@pytest.fixture
def service(server: Address) -> Iterator[Any]:
    """The client's session, which ends with the test."""
    yield from client_of(server)


@pytest.fixture
def training(service: Any, server: Address) -> Any:
    """The client's model under training."""
    return service.create_lora_training_client(base_model=server.model, rank=RANK).result()


@pytest.fixture
def datum() -> Callable[..., Any]:
    """Makes the client's data of a sequence: targets are the next tokens, all of weight 1."""
    types = pytest.importorskip("tinker", reason="needs the client: pip install tinker").types

    def make(tokens: list[int], **inputs: Any) -> Any:
        given = {"target_tokens": tokens[1:], **(inputs or {"weights": [1.0] * (len(tokens) - 1)})}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)

    return make

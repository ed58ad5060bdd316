"""A worker replies whatever a plugin does in it."""

import socket
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import ray
from torch.distributed import TCPStore

from rlcore.spi import PluginError
from rlcore_ray.worker import Worker
from rlcore_torchkit.distributed.process_group import listening_store


def test_a_worker_that_a_plugin_would_end_replies_with_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    worker = Worker(0, tmp_path / "log")

    def leave() -> None:
        sys.exit(0)

    monkeypatch.setattr(worker, "rendezvous", leave)
    reply = worker.call("rendezvous")
    assert reply.error is not None
    error = reply.error.restore()
    assert isinstance(error, PluginError)
    assert str(error).startswith("rendezvous: found SystemExit(0) in ")


def test_a_panic_in_a_worker_is_an_error_like_any_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class PanicException(BaseException):
        """As the bindings of libraries in Rust raise it."""

    def panic() -> None:
        raise PanicException("index out of bounds")

    worker = Worker(0, tmp_path / "log")
    monkeypatch.setattr(worker, "rendezvous", panic)
    reply = worker.call("rendezvous")
    assert reply.error is not None
    assert reply.error.text == "PanicException: index out of bounds"


def test_but_ray_may_end_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ray._raylet import raise_sys_exit_with_custom_error_message

    worker = Worker(0, tmp_path / "log")
    monkeypatch.setattr(worker, "rendezvous", lambda: raise_sys_exit_with_custom_error_message("SIGTERM"))
    with pytest.raises(SystemExit):
        worker.call("rendezvous")


@pytest.mark.parametrize("kind", ["torchkit", "torch"])
def test_the_port_where_ranks_meet_is_kept_until_a_store_listens_there(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    worker = Worker(0, tmp_path / "log")
    port = urlsplit(worker.rendezvous()).port
    assert port is not None
    assert not is_port_free(port)
    timeout = timedelta(seconds=300)
    if kind == "torchkit":
        store = listening_store("127.0.0.1", port, 1, timeout)
    else:
        store = TCPStore("127.0.0.1", port, 1, is_master=True, timeout=timeout)
    store.set("here", "1")
    assert store.get("here") == b"1"


@pytest.mark.parametrize(("platform", "is_free"), [("linux", False), ("darwin", True)])
def test_the_port_is_released_before_the_trainer_is_built_where_no_other_socket_could_listen_there(
    platform: str, is_free: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    worker = Worker(0, tmp_path / "log")
    address = urlsplit(worker.rendezvous())
    could_bind = []

    def build(arguments: object) -> None:
        could_bind.append(is_port_free(address.port))
        raise PluginError("no trainer")

    monkeypatch.setattr(worker, "_plugins", SimpleNamespace(build_trainer=build))
    monkeypatch.setattr(sys, "platform", platform)
    order: Any = SimpleNamespace(trainer=None)
    with pytest.raises(PluginError, match="no trainer"):
        worker.build(order)
    assert could_bind == [is_free]
    assert is_port_free(address.port), "no trainer will listen there"


def is_port_free(port: int | None) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True

"""A Hub that cannot be reached is told within seconds; one that is slow is waited for."""

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from rlcore.config.model import ModelConfig
from rlcore.spi import ModelError
from rlcore_text.tokenizers import hub_reach
from rlcore_text.tokenizers.hub_reach import hub_problem, is_here, why_unreachable
from rlcore_text.tokenizers.tokenizer import load_tokenizer


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_reach, "WAITS_S", (0.1, 0.2))


@contextmanager
def listening() -> Iterator[int]:
    """The port of a server that takes connections and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield server.getsockname()[1]


@contextmanager
def full(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """The port of a server whose queue is full, so that the system answers no other connection."""
    with closing(socket.create_server((host, port), backlog=0)) as server:
        port = server.getsockname()[1]
        with closing(socket.create_connection((host, port))):
            yield port


@pytest.fixture
def closed() -> Iterator[int]:
    """A port that refuses connections, and that nothing else can take meanwhile."""
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_a_server_that_is_there_is_reached_however_slow_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert why_unreachable() is None


def test_one_that_refuses_is_tried_again_for_a_moment(monkeypatch: pytest.MonkeyPatch, closed: int) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}/mirror")
    start = time.monotonic()
    refused = f"[Errno {errno.ECONNREFUSED}] Connect call failed ('127.0.0.1', {closed})"
    assert why_unreachable() == f"http://127.0.0.1:{closed}/mirror: {refused}"
    assert time.monotonic() - start >= sum(hub_reach.WAITS_S)


def test_no_answer_is_waited_for_as_long_as_the_hubs_own_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    with full() as port:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        assert why_unreachable() == f"http://127.0.0.1:{port}: no connection within 1 s"


def test_a_proxy_is_what_has_to_be_reached(monkeypatch: pytest.MonkeyPatch, closed: int) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    with listening() as port:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        assert why_unreachable() is None
    monkeypatch.setenv("https_proxy", f"127.0.0.1:{closed}")
    assert f"('127.0.0.1', {closed})" in (why_unreachable() or "")
    monkeypatch.setenv("no_proxy", "hub.invalid")
    found = why_unreachable() or ""
    assert found.startswith("https://hub.invalid: ")
    assert "127.0.0.1" not in found


def test_a_proxy_that_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def answer() -> None:
            for _ in range(1 + len(hub_reach.WAITS_S)):
                connection, _ = server.accept()
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")

        Thread(target=answer, daemon=True).start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert why_unreachable() == "https://hub.invalid: 407 Proxy Authentication Required"


@pytest.mark.parametrize("proxy", ["http://user:pass#word@127.0.0.1:3128", "http://[::1"])
def test_what_is_no_url_is_left_to_the_hubs_client(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("https_proxy", proxy)
    assert why_unreachable() is None
    monkeypatch.delenv("https_proxy")
    monkeypatch.setattr(constants, "ENDPOINT", "hub.invalid")
    assert why_unreachable() is None


def test_a_proxys_credentials_are_not_told(monkeypatch: pytest.MonkeyPatch, closed: int) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub.invalid")
    monkeypatch.setenv("https_proxy", f"http://user:secret@127.0.0.1:{closed}")
    assert why_unreachable() == f"https://hub.invalid: [Errno {errno.ECONNREFUSED}] Connect call failed ('127.0.0.1', {closed})"


def test_an_address_that_leads_nowhere_keeps_no_other_one_from_being_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose IPv6 leads nowhere."""
    with listening() as port, full("127.0.0.2", port):
        monkeypatch.setattr(constants, "ENDPOINT", f"http://hub.invalid:{port}")
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]
        look_up = socket.getaddrinfo
        monkeypatch.setattr(
            socket,
            "getaddrinfo",
            lambda host, *rest, **options: found if "hub" in str(host) else look_up(host, *rest, **options),
        )
        assert why_unreachable() is None


def test_a_tokenizer_that_does_not_load_is_no_slip_in_the_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its model was found."""
    from transformers import AutoTokenizer

    def fail(*_: object, **__: object) -> None:
        raise OSError("no tokenizer there")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    fetch(tmp_path, "config.json")
    with pytest.raises(ModelError, match="Save the tokenizer"):
        load_tokenizer(ModelConfig(path="no-such/model"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        load_tokenizer(ModelConfig(path="no-such/model"))


def fetch(cache: Path, name: str) -> None:
    """Put a file of no-such/model where the Hub's client would."""
    folder = cache / "models--no-such--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("a" * 40) / name).write_text("{}")


def test_nothing_is_asked_where_the_hub_is_ruled_out(monkeypatch: pytest.MonkeyPatch, closed: int) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert why_unreachable() is None


@pytest.mark.parametrize("near", [True, False])
def test_a_model_of_a_hub_out_of_reach_is_told_before_the_hubs_client_tries_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed: int, near: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
    if near:
        (tmp_path / "no-such" / "modell").mkdir(parents=True)
    with pytest.raises(ModelError, match="the Hub cannot be reached") as raised:
        load_tokenizer(ModelConfig(path="no-such/model"))
    assert ("Did you mean no-such/modell?" if near else "HF_ENDPOINT") in str(raised.value)


def test_what_was_fetched_before_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed: int) -> None:
    """Whichever of its files is there: some tokenizers have no tokenizer_config.json."""
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = ModelConfig(path="no-such/model")
    assert hub_problem(model) is not None
    fetch(tmp_path, "config.json")
    assert hub_problem(model) is None
    assert not is_here(model)


@pytest.mark.parametrize("path", ["a--b", "/no/such/directory"])
def test_what_can_be_no_name_on_the_hub_is_told_as_any_other(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    with listening() as port:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        with pytest.raises(ModelError) as raised:
            load_tokenizer(ModelConfig(path=path))
    (problem,) = raised.value.problems
    assert problem.found.startswith(f"{path!r}, which is no directory here")

"""A run handles each answer of its followers, which a small HTTP server gives."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import define, field
from safetensors.torch import load_file

from rlcore.spi import RefitError, TensorSpec, WeightExport
from rlcore_torchkit.refit.digest import make_buckets
from rlcore_vllm.refit.followers import Followers
from rlcore_vllm.setup.config import VllmConfig

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4), "c": torch.zeros(5)}


def export(version: int = 3) -> WeightExport:
    """Three tensors in two buckets."""
    specs = tuple(TensorSpec(name=name, shape=tuple(tensor.shape), dtype="float32") for name, tensor in TENSORS.items())
    buckets = make_buckets(TENSORS.items(), 40)
    return WeightExport(weight_version=version, specs=specs, buckets=buckets, persistent=True)


@define
class PlayedMirror:
    """Answers as a server of one rank would, unless told otherwise."""

    calls: list[str] = field(factory=list)
    loaded: dict[str, torch.Tensor] = field(factory=dict)
    answers: dict[str, Any] = field(factory=dict)
    """By route or step: what to answer in place of the usual; an integer is a status."""
    _digests: dict[str, int] = field(factory=dict)
    _version: int = -1

    def answer(self, route: str, content: dict[str, Any]) -> Any:
        if route != "/collective_rpc":
            self.calls.append(route)
            return self.answers.get(route.partition("?")[0], {"success": True})
        assert content["method"] == "rlcore_refit"
        step, body = content["args"]
        self.calls.append(step)
        if step in self.answers:
            return {"results": [self.answers[step]]}
        if step == "begin":
            self._version, self._digests = body["weight_version"], {}
        if step == "bucket":
            stored = list(load_file(body["where"]["file"]).values())
            self.loaded |= dict(zip(body["names"], stored, strict=True))
            self._digests |= dict(zip(body["names"], body["digests"], strict=True))
        return {"results": [{"weight_version": self._version, "digests": self._digests} if step == "finish" else {}]}


@pytest.fixture
def follower() -> Iterator[tuple[PlayedMirror, str]]:
    """A follower and its address."""
    played = PlayedMirror()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = played.answer(self.path, content)
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(b"a detail" if isinstance(answer, int) else json.dumps(answer).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield played, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


Refit = Callable[..., None]


@pytest.fixture
def refit(follower: tuple[PlayedMirror, str], tmp_path: Path) -> Refit:
    """One refit with the played follower."""

    def run(*more: str, required: bool = False) -> None:
        config = VllmConfig(
            followers=(follower[1], *more), followers_required=required, refit_directory=str(tmp_path), refit_timeout_s=300.0
        )
        followers = Followers(config)
        assert sum(len(bucket.tensors) for bucket in followers.tee(export()).buckets) == 3
        followers.push()
        followers.close()
        assert list(tmp_path.iterdir()) == []

    return run


def test_a_mirror_is_paused_updated_and_resumed(
    follower: tuple[PlayedMirror, str], refit: Refit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # a follower is reached directly
    refit(required=True)
    played = follower[0]
    pause, drop = "/pause?mode=keep&clear_cache=true", "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
    steps = ["connect", pause, "begin", "bucket", "bucket", "finish", drop, "/update_weight_version", "/resume"]
    assert played.calls == steps
    assert played.loaded.keys() == TENSORS.keys()
    assert all(torch.equal(played.loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_version_of_vllm_without_labels_will_do(
    follower: tuple[PlayedMirror, str], refit: Refit, caplog: pytest.LogCaptureFixture
) -> None:
    follower[0].answers["/update_weight_version"] = 404
    refit(required=True)
    assert follower[0].calls[-1] == "/resume"
    assert not caplog.records


WRONG = {"weight_version": 3, "digests": {"a": 1, "b": 2, "c": 3}}


@pytest.mark.parametrize(
    ("step", "answer", "message", "resumed"),
    [
        ("begin", {"refused": "refit: c is unknown to the model"}, "c is unknown to the model", True),
        ("bucket", {"refused": "refit: 1 tensor(s) changed"}, "changed. It stays paused until a refit succeeds", False),
        ("bucket", {"failed": "RuntimeError: no"}, "RuntimeError: no. It stays paused until a refit succeeds", False),
        ("finish", WRONG, "rank 0 acknowledges other weights (a, b, c). It stays paused", False),
        ("finish", {"weight_version": 2, "digests": {}}, "acknowledges other weights", False),
        ("/reset_prefix_cache", {"success": False}, "did not drop its caches. It stays paused", False),
        ("/pause", 500, "/pause: HTTP 500: a detail", False),
        ("/pause", 404, "expected a server of vLLM", False),
    ],
)
def test_a_mirror_that_cannot_follow_is_a_warning_or_an_error(
    follower: tuple[PlayedMirror, str],
    refit: Refit,
    caplog: pytest.LogCaptureFixture,
    step: str,
    answer: Any,
    message: str,
    resumed: bool,
) -> None:
    played, address = follower
    played.answers[step] = answer
    refit()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"follower {address} does not have version 3: " in record.message
    assert message in record.message
    assert ("/resume" in played.calls) == resumed
    with pytest.raises(RefitError, match="does not have version 3"):
        refit(required=True)


def test_a_mirror_that_is_gone_stops_no_other(
    follower: tuple[PlayedMirror, str], refit: Refit, caplog: pytest.LogCaptureFixture
) -> None:
    refit("http://127.0.0.1:9")
    (record,) = caplog.records
    assert "follower http://127.0.0.1:9 does not have version 3" in record.message
    assert "refused" in record.message
    assert follower[0].calls[-1] == "/resume"


def test_weights_that_cannot_be_written_leave_the_run_alone(
    follower: tuple[PlayedMirror, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = VllmConfig(followers=(follower[1],), refit_directory=str(tmp_path / "none"))
    followers = Followers(config)
    assert sum(len(bucket.tensors) for bucket in followers.tee(export()).buckets) == 3
    followers.push()
    assert follower[0].calls == []
    assert "no follower is updated" in caplog.records[0].message
    required = Followers(VllmConfig(followers=(follower[1],), refit_directory=str(tmp_path / "none"), followers_required=True))
    with pytest.raises(RefitError, match="no follower is updated"):
        list(required.tee(export()).buckets)


def test_without_mirrors_the_export_passes_as_it_is() -> None:
    given = export()
    followers = Followers(VllmConfig())
    assert followers.tee(given) is given
    followers.push()

"""Connecting to a Ray cluster: what cannot be reached is said in time."""

import socket
import subprocess
from pathlib import Path

import pytest

from rlcore.config.recipe import ClusterConfig
from rlcore.run.execution.ray import session
from rlcore.spi import ConfigError


def test_an_address_where_nothing_listens_is_said_in_time() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match=rf'"127.0.0.1:{port}", where no Ray cluster can be joined: it takes no connection'):
        session._authentication(f"127.0.0.1:{port}")


def test_an_address_where_something_else_listens_is_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER_S", 3.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match="does not answer as Ray within 3 s"):
            session._authentication(f"127.0.0.1:{other.getsockname()[1]}")


def test_no_running_cluster_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = subprocess.CompletedProcess([], 1, "", "none")
    monkeypatch.setattr(session.subprocess, "run", lambda *_, **__: result)
    with pytest.raises(ConfigError, match='"auto", where no Ray cluster can be joined: none'):
        session._authentication("auto")


@pytest.mark.parametrize(
    ("has_token", "refused", "tried", "found"),
    [
        (False, (), [None], {}),
        (True, (), ["token"], {"RAY_AUTH_MODE": "token"}),
        (True, ("token",), ["token", None], {}),
    ],
)
def test_a_cluster_that_asks_for_the_users_token_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_token: bool,
    refused: tuple[str, ...],
    tried: list[str | None],
    found: dict[str, str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    modes = []

    def status(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        modes.append(env.get("RAY_AUTH_MODE"))
        return subprocess.CompletedProcess([], int(modes[-1] in refused), "", "refused")

    monkeypatch.setattr(session.subprocess, "run", status)
    assert session._authentication("auto") == found
    assert modes == tried


def test_a_local_cluster_that_does_not_start_is_a_problem_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConfigError, match="a local Ray cluster that does not start: Exception: The current node timed out"):
        session._start(ClusterConfig(gpus_per_node=2), "cpu")

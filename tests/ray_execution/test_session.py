"""Connecting to a Ray cluster: what cannot be reached is said in time."""

import os
import resource
import socket
import subprocess
from pathlib import Path

import pytest

from rlcore.spi import ConfigError, Problem, StorageError, WorkerError
from rlcore_ray import session
from rlcore_ray.config import RayConfig


def problem_of_joining(address: str) -> Problem:
    """The one problem that keeps a session from joining this address."""
    with pytest.raises(ConfigError) as raised, session.ray_session(RayConfig(address=address), "cpu", None):
        pass
    (problem,) = raised.value.problems
    assert problem.path == "cluster.address"
    return problem


def test_an_address_where_nothing_listens_is_said_in_time() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        problem = problem_of_joining(f"127.0.0.1:{port}")
    assert problem.found.startswith(f'"127.0.0.1:{port}", where no Ray cluster can be joined: it takes no connection')


def test_an_address_where_something_else_listens_is_said_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER_S", 3.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        problem = problem_of_joining(f"127.0.0.1:{other.getsockname()[1]}")
    assert problem.found.endswith("it does not answer as Ray within 3 s")


def test_no_running_cluster_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = subprocess.CompletedProcess([], 1, "", "none")
    monkeypatch.setattr(session.subprocess, "run", lambda *_, **__: result)
    assert problem_of_joining("auto").found == '"auto", where no Ray cluster can be joined: none'


@pytest.mark.parametrize(
    ("has_token", "refused", "tried"),
    [(False, (), [None]), (True, (), [None]), (True, (None,), [None, "token"])],
)
def test_a_cluster_that_asks_for_the_users_token_is_told_of_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_token: bool,
    refused: tuple[str | None, ...],
    tried: list[str | None],
) -> None:
    import ray  # before the variables of a token, which it would keep

    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    modes: list[str | None] = []
    joined: list[str | None] = []

    def status(*_: object, env: dict[str, str], **__: object) -> subprocess.CompletedProcess[str]:
        modes.append(env.get("RAY_AUTH_MODE"))
        return subprocess.CompletedProcess([], int(modes[-1] in refused), "", "AuthenticationError: refused")

    monkeypatch.setattr(session.subprocess, "run", status)
    monkeypatch.setattr(ray, "init", lambda **_: joined.append(os.environ.get("RAY_AUTH_MODE")))
    with session.ray_session(RayConfig(address="auto"), "cpu", None):
        assert (modes, joined) == (tried, tried[-1:])
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_local_cluster_that_does_not_start_is_no_problem_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def fail(**_: object) -> None:
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(ray, "init", fail)
    with (
        pytest.raises(WorkerError, match="timed out during startup"),
        session.ray_session(RayConfig(gpus_per_node=2), "cpu", None),
    ):
        pass


def test_ray_is_not_started_where_files_may_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes would inherit the limit, and its core would end this one."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2048, resource.RLIM_INFINITY))
    with (
        pytest.raises(StorageError, match="2,048 bytes; expected at least 67,108,864"),
        session.ray_session(RayConfig(gpus_per_node=2), "cpu", None),
    ):
        pass

"""The address of a run's session server: one that the environment names, or the loopback interface."""

import pytest

from rlcore_serve.sessions.host import HOST, host_problems, session_host


@pytest.mark.parametrize(("value", "host"), [(None, "127.0.0.1"), ("", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")])
def test_an_address_of_this_machine_is_taken(monkeypatch: pytest.MonkeyPatch, value: str | None, host: str) -> None:
    monkeypatch.delenv(HOST, raising=False)
    if value is not None:
        monkeypatch.setenv(HOST, value)
    assert session_host() == host
    assert list(host_problems()) == []


@pytest.mark.parametrize("value", ["0.0.0.0", "::", "192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_agents_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(HOST, value)
    (problem,) = host_problems()
    assert problem.path == HOST
    assert value in problem.found

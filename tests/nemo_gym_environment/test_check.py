"""What is wrong with the section is said before a run, and servers are asked."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rlcore_nemo_gym.check import check
from rlcore_nemo_gym.config import NemoGymConfig
from rlcore_nemo_gym.policy_server import listening

from .gym_servers import Gym, free_port, row, serving


@pytest.fixture
def gym() -> Iterator[Gym]:
    gym = Gym("http://127.0.0.1:9/v1")
    with serving(gym):
        yield gym


def found(**options: Any) -> dict[str, str]:
    """What is found under each key."""
    config = NemoGymConfig(**{"policy_port": free_port()} | options)
    return {problem.path.removeprefix("environment.nemo_gym."): problem.found for problem in check(None, config)}


def test_servers_that_answer_are_fine(gym: Gym) -> None:
    for options in ({"head_url": gym.url}, {"head_url": f"{gym.url}/", "agent": "double_simple_agent"}, {"agent_url": gym.url}):
        assert not found(**options)


def test_servers_that_do_not_answer_are_problems(gym: Gym) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert nowhere in found(head_url=nowhere)["head_url"]
    assert nowhere in found(agent_url=nowhere)["agent_url"]
    (problem,) = check(None, NemoGymConfig(head_url=gym.url, agent="other", policy_port=free_port()))
    assert (problem.path, problem.found) == ("environment.nemo_gym.agent", "'other'")
    assert "'double_simple_agent'" in problem.expected


@pytest.mark.parametrize(
    "url",
    ["localhost:11000", "ftp://h", "http://h/run", "http://h?a", "http://user@h:1", "http://h:0", "http://h:x", "http:// h"],
)
def test_what_is_no_address_is_a_problem(url: str) -> None:
    assert found(agent_url=url) == {"agent_url": repr(url.rpartition("@")[2])}
    assert found(head_url=url) == {"head_url": repr(url.rpartition("@")[2])}


def test_all_problems_are_said_together(gym: Gym, tmp_path: Path) -> None:
    with listening("127.0.0.1", 0) as taken:
        port, missing = taken.getsockname()[1], str(tmp_path / "nowhere.jsonl")
        problems = found(train_files=(missing,), policy_port=port, agent="a", agent_url=gym.url)
    assert problems.keys() == {"train_files", "policy_port", "agent_url"}
    assert missing in problems["train_files"]
    assert str(port) in problems["policy_port"]
    assert "policy_host" in found(head_url=gym.url, policy_host="no such host")


@contextmanager
def saying(content: bytes) -> Iterator[str]:
    """The address of a server that answers whoever connects with these bytes, and goes away."""

    def answer() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(content)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(300)


REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n"


@pytest.mark.parametrize(
    "content",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"\x15\x03\x01\x00\x02\x02\x46", b"", REPLY + b"[", REPLY + b"[" * 200_000],
    ids=["ssh", "tls", "nothing", "cut", "deep"],
)
def test_what_is_no_head_server_is_a_problem(content: bytes) -> None:
    with saying(content) as url:
        assert url in found(head_url=url)["head_url"]
        if not content.endswith(b"[[["):
            assert url in found(agent_url=url)["agent_url"]


def test_a_reply_has_bounds(gym: Gym, monkeypatch: pytest.MonkeyPatch) -> None:
    gym.instances = "[]" + " " * 9 * 2**20
    assert "more than" in found(head_url=gym.url)["head_url"]
    monkeypatch.setattr("rlcore_nemo_gym.check.TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "head_url" in found(head_url=f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_rows_are_held_against_the_servers(gym: Gym, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    references: list[Any] = [{"name": "double_simple_agent"}, {"name": "other"}, {"name": "other"}, None]
    file.write_text("".join(json.dumps(row() | {"agent_ref": one}) + "\n" for one in references))
    config = NemoGymConfig(head_url=gym.url, policy_port=free_port(), evaluation_files=(str(file),))
    problems = check(None, config)
    assert {problem.path for problem in problems} == {"environment.nemo_gym.evaluation_files"}
    assert [problem.found for problem in problems] == [
        "2 of 4 rows whose agent_ref names 'other'",
        "1 of 4 rows whose agent_ref has no name",
    ]
    assert all("'double_simple_agent'" in problem.expected for problem in problems)
    assert not found(head_url=gym.url, evaluation_files=(str(file),), agent="double_simple_agent")
    file.write_text("{")
    assert "line 1 is no JSON" in found(head_url=gym.url, train_files=(str(file),))["train_files"]

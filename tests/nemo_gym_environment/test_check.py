"""What is wrong with the section is said before a run, and servers are asked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlcore_nemo_gym.check import check
from rlcore_nemo_gym.config import NemoGymConfig
from rlcore_nemo_gym.server_thread import listening

from .gym_servers import Gym, free_port, serving


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
        taken.listen()
        port, missing = taken.getsockname()[1], str(tmp_path / "nowhere.jsonl")
        problems = found(train_files=(missing,), policy_port=port, agent="a", agent_url=gym.url)
    assert problems.keys() == {"train_files", "policy_port", "agent_url"}
    assert missing in problems["train_files"]
    assert str(port) in problems["policy_port"]
    assert "policy_host" in found(head_url=gym.url, policy_host="no such host")

"""Episodes of the environment `mcp` on a real server, over standard input and output and over HTTP."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from attrs import evolve

from rlcore.spi import (
    ConfigError,
    DataError,
    EnvironmentContext,
    FinishReason,
    RewardError,
    StepResult,
    ToolCall,
    Turn,
    failure_kind,
)
from rlcore_mcp.config import McpConfig, McpServerConfig
from rlcore_mcp.environment import McpEnvironment

SERVER = str(Path(__file__).with_name("tool_server.py"))
STDIO = McpServerConfig(command=(sys.executable, SERVER))
ROW = {"prompt": "2 + 3 = ?", "answer": "5"}
Result = TypeVar("Result")


def turn(text: str = "", *calls: ToolCall) -> Turn:
    return Turn(text=text, content=text, tokens=np.zeros(1, np.int32), finish_reason=FinishReason.STOP, tool_calls=calls)


def called(name: str, /, error: str | None = None, **arguments: Any) -> ToolCall:
    return ToolCall(id="1", name=name, arguments=arguments, text="", error=error)


@contextmanager
def serving() -> Iterator[McpServerConfig]:
    """The server over HTTP on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        while not is_reached(port):
            assert process.poll() is None
            time.sleep(0.1)
        yield McpServerConfig(url=f"http://127.0.0.1:{port}/mcp")
    finally:
        process.kill()
        process.wait()


def is_reached(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def http() -> Iterator[McpServerConfig]:
    with serving() as server:
        yield server


@pytest.fixture
def environments() -> Iterator[Any]:
    """A function of servers and options that returns an environment, which is closed at the end."""
    opened: list[McpEnvironment] = []

    def made(servers: dict[str, McpServerConfig], **options: Any) -> McpEnvironment:
        opened.append(McpEnvironment(EnvironmentContext(seed=0), McpConfig(servers=servers, **options)))
        return opened[-1]

    yield made
    for environment in opened:
        environment.close()


def wait(work: Awaitable[Result]) -> Result:
    """The result of a call, each on an event loop of its own."""

    async def run() -> Result:
        return await work

    return asyncio.run(run())


def step(environment: McpEnvironment, *calls: ToolCall, state: Any = None) -> StepResult:
    return wait(environment.step(state or wait(environment.reset(ROW, 0)).state, turn("", *calls)))


def contents(result: StepResult) -> list[str]:
    assert result.observation is not None
    messages = result.observation.messages
    assert messages is not None
    return [message["content"] for message in messages]


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_an_episode_calls_a_tool_and_is_rewarded_for_its_answer(
    transport: str, http: McpServerConfig, environments: Any
) -> None:
    environment = environments({"sums": STDIO if transport == "stdio" else http})
    reset = wait(environment.reset(ROW, 0))
    add = next(tool for tool in reset.observation.tools if tool["function"]["name"] == "add")
    assert add["function"]["description"] == "Adds two integers."
    assert add["function"]["parameters"]["required"] == ["a", "b"]
    assert reset.observation.messages == [{"role": "user", "content": "2 + 3 = ?"}]
    first = step(environment, called("add", a=2, b=3), called("add", a=2, b="x"), state=reset.state)
    assert not first.done
    assert contents(first)[0] == "5"
    assert "valid integer" in contents(first)[1]
    assert first.metrics == {"tool_error": 0.5}
    assert [call["is_error"] for call in first.state["tool_calls"]] == [False, True]
    assert reset.state["tool_calls"] == []
    for answer, reward in (("<think>2 and 3</think> 5\n", 1.0), ("6", 0.0)):
        last = wait(environment.step(first.state, turn(answer)))
        assert (last.done, last.reward, last.success) == (True, reward, reward == 1.0)
        assert last.metrics["calls_per_episode"] == 2.0


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_errors_of_tools_go_to_the_policy(transport: str, http: McpServerConfig, environments: Any) -> None:
    environment = environments({"sums": STDIO if transport == "stdio" else http})
    calls = [called("fail"), called("none"), called("add", error="no JSON"), called("picture")]
    result = step(environment, *calls)
    assert ["error" in content.lower() for content in contents(result)] == [True, True, True, False]
    assert "'none'" in contents(result)[1]
    assert contents(result)[3] == "a dot\n[image/png]"
    assert result.metrics == {"tool_error": 0.75}


def test_a_server_that_dies_fails_the_episode_and_starts_again_for_the_next(environments: Any) -> None:
    environment = environments({"sums": STDIO})
    with pytest.raises(RewardError, match="'sums'.*'die'.*disk") as failed:
        step(environment, called("die"))
    assert failure_kind(failed.value) == "tool"
    assert contents(step(environment, called("add", a=1, b=1))) == ["2"]


def test_an_http_server_that_dies_fails_the_episode(environments: Any) -> None:
    with serving() as server:
        environment = environments({"sums": server})
        state = wait(environment.reset(ROW, 0)).state
        for call in (called("die"), called("add", a=1, b=1)):
            with pytest.raises(RewardError, match=f"(?s)'sums'.*{server.url}") as failed:
                step(environment, call, state=state)
            assert failure_kind(failed.value) == "tool"


@pytest.mark.parametrize("transport", ["stdio", "http"])
def test_a_call_has_its_time(transport: str, http: McpServerConfig, environments: Any) -> None:
    server = evolve(STDIO if transport == "stdio" else http, call_timeout_s=0.5)
    environment = environments({"sums": server})
    with pytest.raises(RewardError, match="'hang'.*environment.mcp.servers.sums.call_timeout_s") as failed:
        step(environment, called("hang"))
    assert failure_kind(failed.value) == "tool"


FAILS = {
    "ends": ((sys.executable, "-c", "import sys; sys.exit('no licence')"), "no licence"),
    "speaks another protocol": ((sys.executable, "-c", "print('hello')"), "did not start"),
    "hangs": ((sys.executable, "-c", "import time; time.sleep(600)"), "start_timeout_s"),
}


@pytest.mark.parametrize("name", FAILS)
def test_a_server_that_does_not_start_fails_the_episode(name: str, environments: Any) -> None:
    command, words = FAILS[name]
    limit_s = 1.0 if name == "hangs" else 120.0
    environment = environments({"sums": McpServerConfig(command=command, start_timeout_s=limit_s)})
    with pytest.raises(RewardError, match=f"(?s)'sums'.*{words}") as failed:
        wait(environment.reset(ROW, 0))
    assert failure_kind(failed.value) == "tool"


def test_all_servers_that_do_not_start_are_in_one_error(environments: Any) -> None:
    bad = McpServerConfig(command=FAILS["ends"][0])
    with pytest.raises(RewardError, match="(?s)'one'.*'two'") as failed:
        wait(environments({"one": bad, "two": bad, "good": STDIO}).reset(ROW, 0))
    assert failure_kind(failed.value) == "tool"


def test_tools_of_one_name_are_refused_until_one_is_left_out(environments: Any) -> None:
    picked = McpServerConfig(command=STDIO.command, tools=("variable",))
    with pytest.raises(ConfigError) as refused:
        wait(environments({"a": STDIO, "b": picked}).reset(ROW, 0))
    (problem,) = refused.value.problems
    assert (problem.path, "'variable'" in problem.found) == ("environment.mcp.servers", True)
    environment = environments({"a": McpServerConfig(command=STDIO.command, tools=("add",)), "b": picked})
    tools = wait(environment.reset(ROW, 0)).observation.tools
    assert [tool["function"]["name"] for tool in tools] == ["add", "variable"]
    assert contents(step(environment, called("add", a=1, b=1), called("variable", name="PATH"))) == ["2", os.environ["PATH"]]


def test_a_tool_that_a_server_lacks_is_refused(environments: Any) -> None:
    server = McpServerConfig(command=STDIO.command, tools=("multiply",))
    with pytest.raises(RewardError, match="'multiply'.*environment.mcp.servers.sums.tools.*'add'"):
        wait(environments({"sums": server}).reset(ROW, 0))


def test_a_server_gets_the_variables_that_the_recipe_names(environments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIKI_TOKEN", "abc")
    named = McpServerConfig(command=STDIO.command, pass_environment=("WIKI_TOKEN",))
    for server, expected in ((STDIO, "unset"), (named, "abc")):
        assert contents(step(environments({"s": server}), called("variable", name="WIKI_TOKEN"))) == [expected]


def test_a_reward_function_reads_the_calls(environments: Any, tmp_path: Path) -> None:
    file = tmp_path / "score.py"
    file.write_text("def score(completion, answer, tool_calls):\n    return len(tool_calls) + (completion == answer) / 2\n")
    environment = environments({"sums": STDIO}, path=f"{file}:score", max_concurrent=1)
    state = step(environment, called("add", a=2, b=3)).state
    assert wait(environment.step(state, turn("5"))).reward == 1.5


@pytest.mark.parametrize("field", ["tools", "tool_calls"])
def test_a_row_with_tools_of_its_own_is_refused(field: str, environments: Any) -> None:
    with pytest.raises(DataError, match=f"'{field}'"):
        wait(environments({"sums": STDIO}).reset({**ROW, field: []}, 0))


def test_programs_end_with_the_environment(environments: Any) -> None:
    environment = environments({"sums": STDIO})
    step(environment, called("add", a=1, b=1))
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")

    def servers() -> list[str]:
        found = [
            Path(f"/proc/{pid}/cmdline") for path in children.parents[1].glob("*/children") for pid in path.read_text().split()
        ]
        return [line for line in (one.read_text() for one in found if one.exists()) if SERVER in line and "127" not in line]

    before = len(servers())
    environment.close()
    assert len(servers()) == before - 1

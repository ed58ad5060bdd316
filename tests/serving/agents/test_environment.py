"""The environment `agent`: functions and programs, and how each of them fails."""

import asyncio
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import ConfigError, EnvironmentContext, EpisodeResult, PluginError, RewardError, SessionEndpoint
from rlcore_serve.agents import process
from rlcore_serve.agents.config import AgentConfig
from rlcore_serve.agents.environment import AgentBackend, check
from rlcore_serve.agents.function import AgentClient
from rlcore_serve.agents.process import run_process

SESSION = SessionEndpoint(base_url="http://127.0.0.1:9/t/v1", api_key="t", model="policy")
ROW = {"prompt": "1+1", "answer": "2"}
GONE = "import os, sys, time\nif os.fork() == 0:\n    open(sys.argv[1], 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
"""A program that starts another one, whose number it writes to a file."""


def run(row: dict[str, Any] = ROW, **options: Any) -> EpisodeResult:
    """An episode, which ends before what it leaves behind would."""
    backend = AgentBackend(EnvironmentContext(seed=0), AgentConfig(**options))
    return asyncio.run(asyncio.wait_for(backend.run(row, 3, SESSION), 300))


def program(text: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text, *arguments)


def is_gone(pid: int) -> bool:
    """Whether a process ends, or waits to be noticed, long before it would by itself."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module with an agent and returns the path of its function."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(text: str, name: str = "run") -> str:
        (tmp_path / "agent.py").write_text(text)
        return f"{tmp_path / 'agent.py'}:{name}"

    return write


def test_a_function_gets_the_task_and_a_client(agent: Any) -> None:
    function = agent(
        "async def run(task, client):\n"
        "    assert str(client.openai.base_url) == client.base_url + '/'\n"
        "    assert client.openai.timeout is None\n"
        "    parts = {'answer': 1}\n"
        "    reward = int(task['answer']) / 4\n"
        "    return {'reward': reward, 'model': len(client.model), 'success': True, 'reward_components': parts}\n"
    )
    result = run(function=function)
    assert (result.reward, result.success, result.metrics) == (0.5, True, {"model": 6.0})
    assert result.reward_components == {"answer": 1.0}


@pytest.mark.parametrize(
    ("said", "success"),
    [
        *(("1", True), ("0.5", False), ("{'reward': 2.0}", True)),
        ("__import__('numpy').float32(1)", True),
        ("{'reward': __import__('numpy').int64(2), 'success': __import__('numpy').bool_(False)}", False),
    ],
)
def test_success_is_a_reward_that_is_high_enough(agent: Any, said: str, success: bool) -> None:
    assert run(function=agent(f"async def run(task, client):\n    return {said}\n")).success is success


@pytest.mark.parametrize(
    "said",
    [
        *("None", "True", "'1'", "float('nan')", "10**400", "{}", "{'reward': 1, 'success': 1}"),
        *("{'reward': 1, 'steps': 'x'}", "{'reward': 1, 'steps': float('inf')}"),
        *("{'reward': 1, 'reward_components': [1]}", "{'reward': 1, 'reward_components': {'a': None}}"),
    ],
)
def test_a_function_without_a_reward_has_failed(agent: Any, said: str) -> None:
    with pytest.raises(RewardError, match="expected"):
        run(function=agent(f"async def run(task, client):\n    return {said}\n"))


def test_a_program_is_given_the_session_and_the_task() -> None:
    text = (
        "import json, os, sys\n"
        "task = json.load(sys.stdin)\n"
        "assert task == json.loads(os.environ['RLCORE_TASK'])\n"
        "print('thinking')\n"
        "names = ['OPENAI_BASE_URL', 'OPENAI_API_KEY', 'OPENAI_MODEL']\n"
        "print(json.dumps({'reward': float(task['answer']), 'length': len(' '.join(os.environ[name] for name in names))}))\n"
    )
    result = run(command=program(text))
    expected = len(f"{SESSION.base_url} {SESSION.api_key} {SESSION.model}")
    assert (result.reward, result.metrics) == (2.0, {"length": float(expected)})


def test_a_program_gets_no_variable_that_its_recipe_does_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "NAMED_KEY", "SOMETHING"):
        monkeypatch.setenv(name, "value")
    names = "('WANDB_API_KEY', 'NAMED_KEY', 'SOMETHING', 'PATH')"
    command = program(
        f"import os, json; print(json.dumps({{'reward': sum(2**k for k, n in enumerate({names}) if n in os.environ)}}))"
    )
    assert run(command=command).reward == 8.0
    assert run(command=command, pass_environment=("NAMED_KEY",)).reward == 10.0
    (problem,) = check(None, AgentConfig(command=command, pass_environment=("NOT_SET",)))
    assert problem.path == "environment.agent.pass_environment"


def test_what_a_program_prints_is_told_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAMED_KEY", "very secret")
    with pytest.raises(RewardError) as raised:
        run(command=program("import os, sys; sys.exit(os.environ['NAMED_KEY'])"), pass_environment=("NAMED_KEY",))
    assert "printed: ***" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import sys; print('bad', file=sys.stderr); sys.exit(3)", "exit code 3.*bad"),
        ("import sys; sys.exit(126)", "exit code 126"),  # as of a shell whose program does not start
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.kill(os.getpid(), 40)", "signal 40"),
        ("pass", "no reward.*''"),
        ("print(1); print('done')", "no reward.*'done'"),
        ("print('[]')", r"reward is \[\]"),
        ("print('NaN')", "reward is nan"),
        ("print('[' * 60_000)", "no reward"),
    ],
)
def test_a_program_that_fails_is_one_message(text: str, names: str) -> None:
    with pytest.raises(RewardError, match=names):
        run(command=program(text))


def test_a_program_that_cannot_be_started_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match="missing"):
        run(command=(str(tmp_path / "missing"),))


def test_what_a_program_prints_may_be_long() -> None:
    assert run(command=program("print('x' * 1_000_000); print(1)")).reward == 1.0


def test_a_task_that_is_too_long_for_a_variable_is_read_from_the_standard_input() -> None:
    text = "import json, os, sys; assert 'RLCORE_TASK' not in os.environ; print(len(json.load(sys.stdin)['prompt']))"
    assert run({"prompt": "x" * 300_000}, command=program(text)).reward == 300_000


def test_no_proxy_stands_between_an_agent_and_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy on another machine has no such session, and would read along."""
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:1")
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    monkeypatch.setenv("NO_PROXY", "inside.example")
    monkeypatch.delenv("no_proxy", raising=False)
    text = (
        "import urllib.request as u, os; host = os.environ['OPENAI_BASE_URL'].split('/')[2].split(':')[0]\n"
        "assert u.proxy_bypass(host) and u.proxy_bypass('inside.example') and not u.proxy_bypass('example.com'); print(1)"
    )
    assert run(command=program(text)).reward == 1.0
    client = AgentClient(SESSION).openai
    assert not any(transport is not None for transport in client._client._mounts.values())


def test_what_left_the_group_ends_too(tmp_path: Path) -> None:
    """It holds the output open, in which the reward stands."""
    file = tmp_path / "pid"
    text = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\nprint(1)"
    )
    assert run(command=program(text, str(file))).reward == 1.0
    assert is_gone(int(file.read_text()))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os; os.kill(0, 9)", "signal SIGKILL"),
        ("import os; os.kill(0, 15)", "signal SIGTERM"),
        ("import os; os.abort()", "signal SIGABRT"),
        ("raise SystemExit(126)", "exit code 126"),
    ],
)
def test_how_a_program_ended_is_told(text: str, said: str) -> None:
    with pytest.raises(RewardError, match=f"the agent ended with {said}"):
        run(command=program(f"print(1, flush=True); {text}"))


def test_a_program_that_is_cancelled_as_it_starts_is_killed(tmp_path: Path) -> None:
    backend = AgentBackend(
        EnvironmentContext(seed=0), AgentConfig(command=program("import time; time.sleep(60)", str(tmp_path)))
    )

    def running() -> list[int]:
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(FileNotFoundError, ProcessLookupError):  # others end meanwhile
                if str(tmp_path).encode() in file.read_bytes():
                    found.append(int(file.parent.name))
        return found

    async def cancel() -> None:
        task = asyncio.create_task(backend.run(ROW, 3, SESSION))
        while not running():
            await asyncio.sleep(0)
        begun = running()  # its supervisors, and the program itself
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while running():
            await asyncio.sleep(0.01)
        assert all(map(is_gone, begun))

    asyncio.run(asyncio.wait_for(cancel(), 300))


@pytest.mark.parametrize("seconds", [0.0, 0.001, 0.003])
def test_a_loop_that_closes_as_a_program_starts_waits_for_it_no_longer(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore_serve.agents.process.KILL_S", 0.2)
    backend = AgentBackend(
        EnvironmentContext(seed=0), AgentConfig(command=program("import time; time.sleep(60)", str(tmp_path)))
    )

    async def interrupted() -> None:
        episode = asyncio.create_task(backend.run(ROW, 3, SESSION))
        await asyncio.sleep(seconds)
        assert not episode.done()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(interrupted())


def test_what_a_program_leaves_behind_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    text = (
        GONE
        + "else:\n    while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read(): time.sleep(0.01)\n    print(1)"
    )
    assert run(command=program(text, str(file))).reward == 1.0
    assert is_gone(int(file.read_text()))


def test_a_program_that_is_cancelled_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    backend = AgentBackend(
        EnvironmentContext(seed=0), AgentConfig(command=program(GONE + "else:\n    time.sleep(60)", str(file)))
    )

    async def cancel() -> None:
        task = asyncio.create_task(backend.run(ROW, 3, SESSION))
        while not file.exists() or not file.read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(cancel(), 300))
    assert is_gone(int(file.read_text()))


def test_an_event_loop_that_closes_hears_of_the_end_of_its_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at Ctrl-C: an agent is cancelled, and then all that is at work. What is left open complains in its destructor."""
    complaints: list[Any] = []
    file = tmp_path / "left"
    command = program(  # what it leaves behind holds its output open, so that its end is not heard of at once
        "import subprocess, sys, time; left = subprocess.Popen(['sleep', '60'], start_new_session=True); "
        "open(sys.argv[1], 'w').write(f'{left.pid}.'); time.sleep(60)",
        str(file),
    )

    async def work() -> None:
        running = asyncio.create_task(run_process(command, {}, ""))
        while not file.exists() or "." not in file.read_text():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.sleep(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert others
        for other in others:
            other.cancel()
        await asyncio.wait(others, timeout=120)

    monkeypatch.setattr(process, "KILL_S", 3.0)
    gc.collect()  # what tests before this one have left complains unheard
    monkeypatch.setattr(sys, "unraisablehook", lambda complaint: complaints.append(complaint.exc_value))
    try:
        asyncio.run(work())
        gc.collect()
    finally:
        with suppress(ProcessLookupError):  # the supervisor has killed it
            os.kill(int(file.read_text().rstrip(".")), signal.SIGKILL)
    assert not complaints


def test_what_is_wrong_with_the_section_is_told_before_the_run(agent: Any, tmp_path: Path) -> None:
    def path(**options: Any) -> str:
        (problem,) = check(None, AgentConfig(**options))
        return problem.path

    assert path() == path(function="a.py:run", command=("x",)) == "environment.agent"
    assert path(command=("no-such-program",)) == "environment.agent.command"
    assert path(function=f"{tmp_path}/none.py:run") == "environment.agent.function"
    assert path(function="nothing") == "environment.agent.function"
    assert path(function=agent("raise OSError('broken')")) == "environment.agent.function"
    assert path(function=agent("import sys; sys.exit(1)")) == "environment.agent.function"
    assert path(function=agent("async def run(task): pass")) == "environment.agent.function"
    assert path(function=agent("def run(task, client): pass")) == "environment.agent.function"
    assert path(function=agent("async def run(task, client): pass", "other")) == "environment.agent.function"
    assert not check(None, AgentConfig(function=agent("async def run(task, client): pass")))
    assert not check(None, AgentConfig(command=(sys.executable,)))
    with pytest.raises(ConfigError):
        run(function="nothing")


def test_what_a_function_raises_is_told_with_its_line(agent: Any) -> None:
    function = agent(
        "def look(task):\n    return int(task['answer'] + '?')\n\nasync def run(task, client):\n    return look(task)\n"
    )
    with pytest.raises(RewardError, match=r"ValueError at agent\.py:2"):
        run(function=function)
    with pytest.raises(PluginError, match="no package"):
        run(
            function=agent(
                "from rlcore.spi import PluginError\nasync def run(task, client):\n    raise PluginError('no package')\n"
            )
        )


def test_a_function_does_as_it_likes_with_its_task(agent: Any) -> None:
    """The other samples of the row, and those of the next epoch, begin with it too."""
    row = {"messages": [{"role": "user", "content": "1+1"}]}
    function = agent("async def run(task, client):\n    task['messages'].append('more')\n    return len(task['messages'])\n")
    assert [run(row, function=function).reward for _ in range(2)] == [2.0, 2.0]


def test_a_function_may_use_what_lies_beside_it_and_dataclasses(agent: Any, tmp_path: Path) -> None:
    (tmp_path / "beside_the_agent.py").write_text("from dataclasses import dataclass\n")
    function = agent(
        "from __future__ import annotations\nfrom beside_the_agent import dataclass\n\n"
        "@dataclass\nclass Note:\n    reward: float = 2.0\n\n"
        "async def run(task, client):\n    return Note().reward\n"
    )
    assert run(function=function).reward == 2.0


def test_a_client_without_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(PluginError, match=r"rlcore\[agents\]"):
        _ = AgentClient(SESSION).openai


def test_tasks_come_from_the_recipes_data(agent: Any) -> None:
    function = agent("async def run(task, client): return 1")
    assert AgentBackend(EnvironmentContext(seed=0), AgentConfig(function=function)).rows("train") is None

"""Episodes of the environment `openenv` on a server of its protocol, and on OpenEnv's own where it is installed."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import DataError, EnvironmentContext, EpisodeResult, PluginError, RewardError, Row, SessionEndpoint
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_GENERATOR, FAKE_TRAINER
from rlcore_openenv import environment
from rlcore_openenv.config import FIRST_EVALUATION_SEED, OpenEnvConfig
from rlcore_openenv.environment import OpenEnvBackend
from rlcore_openenv.provider import OPENENV

from .protocol_server import Answer, GameServer, PolicyServer, serving

PYTHON = os.environ.get("RLCORE_OPENENV_PYTHON")
REAL = pytest.mark.skipif(PYTHON is None, reason="RLCORE_OPENENV_PYTHON names no Python with openenv-core 0.3")
ROW = {"seed": 1, "hint": "now"}
"""The letter is "b"."""
RECIPE = """
[model]
path = "none"
[algorithm]
name = "fake"
[environment]
name = "openenv"
[environment.openenv]
urls = ["{url}"]
max_concurrent = 4
num_train = 4
observation_fields = ["text"]
[run]
num_steps = 2
[training]
prompts_per_step = 2
[optimizer]
learning_rate = 0.1
[rollout]
samples_per_prompt = 2
max_prompt_tokens = 150
max_response_tokens = 4
[sinks]
names = []
[evaluation]
at_start = false
at_end = false
"""


@contextmanager
def real_server(*arguments: str) -> Iterator[str]:
    command = [str(PYTHON), str(Path(__file__).with_name("real_server.py")), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            yield program.stdout.readline().strip()
        finally:
            program.kill()


@pytest.fixture(params=["protocol", pytest.param("real", marks=REAL)])
def open_server(request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Starts a server of the game and returns its address."""
    with ExitStack() as stack:

        def start(tools: bool = False, max_concurrent: int = 1) -> str:
            if request.param == "real":
                return stack.enter_context(real_server("tools" if tools else "game", str(max_concurrent)))
            server = GameServer(max_concurrent, tools)
            return stack.enter_context(serving("GET", "/ws", server.handle))

        yield start


def play(
    urls: str | tuple[str, ...], answer: Answer, row: Row = ROW, num_episodes: int = 1, **options: Any
) -> tuple[list[EpisodeResult], list[dict[str, Any]]]:
    """The results of episodes at once, and the requests that the policy got."""
    config = OpenEnvConfig(urls=(urls,) if isinstance(urls, str) else urls, **options)
    backend, policy = OpenEnvBackend(EnvironmentContext(seed=0), config), PolicyServer(answer)

    async def run() -> list[EpisodeResult]:
        endpoint = SessionEndpoint(base_url=f"{url}/v1", api_key="key", model="policy")
        return await asyncio.gather(*(backend.run(row, 7, endpoint) for _ in range(num_episodes)))

    with serving("POST", "/v1/chat/completions", policy.handle) as url:
        return asyncio.run(asyncio.wait_for(run(), 300)), policy.requests


def in_turn(*texts: Any) -> Answer:
    """Gives one answer after another."""
    return lambda messages: texts[sum(message["role"] == "assistant" for message in messages)]


def test_answers_are_steps_until_the_server_is_done(open_server: Callable[..., str]) -> None:
    (result,), requests = play(open_server(), in_turn("a", " b\n"), observation_fields=("text",), system_prompt="Play.")
    assert (result.reward, result.success) == (1.25, True)
    assert result.metrics == {"turns": 2.0, "invalid_actions": 0.0, "done": 1.0, "too_long": 0.0}
    assert requests[0] == {
        "model": "policy",
        "messages": [{"role": "system", "content": "Play."}, {"role": "user", "content": "guess now"}],
    }
    behind = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "wrong"}]
    assert requests[1]["messages"] == requests[0]["messages"] + behind


def test_the_last_reward_that_is_a_number_can_be_the_episodes_own(open_server: Callable[..., str]) -> None:
    (result,), requests = play(open_server(), in_turn("b?", "a", "c?"), reward="last")
    assert (result.reward, result.success) == (0.25, False)
    assert requests[0]["messages"] == [{"role": "user", "content": '{"text": "guess now", "left": 3}'}]


def test_an_episode_has_a_most_number_of_turns(open_server: Callable[..., str]) -> None:
    (result,), requests = play(open_server(), in_turn("a", "c"), max_turns=2)
    assert (result.reward, result.metrics["done"], len(requests)) == (0.5, 0.0, 2)


def test_an_action_can_be_a_json_object_and_the_policy_reads_what_is_wrong_with_it(open_server: Callable[..., str]) -> None:
    answers = in_turn("I pass", 'say {"message": 3}', '{"message": "a"} or {"message": "b"}')
    (result,), requests = play(open_server(), answers, action="json", invalid_action_reward=-0.5)
    assert (result.reward, result.metrics["invalid_actions"]) == (0.0, 2.0)
    told = [message["content"] for message in requests[-1]["messages"] if message["role"] == "user"][1:]
    assert "JSON object" in told[0]
    assert "message: Input should be a valid string" in told[1]


def test_an_invalid_action_can_end_the_episode(open_server: Callable[..., str]) -> None:
    (result,), requests = play(
        open_server(), in_turn("none"), action="json", on_invalid_action="end", invalid_action_reward=-1.0
    )
    assert (result.reward, len(requests)) == (-1.0, 1)


def test_tools_of_the_server_are_the_policys(open_server: Callable[..., str]) -> None:
    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    first = [call("1", "guess", '{"letter": "a"}'), call("2", "lose", "{}"), call("3", "guess", "[]")]
    second = [call("4", "guess", '{"letter": "b"}'), call("5", "guess", '{"letter": "b"}')]
    answers = in_turn(*({"role": "assistant", "content": "", "tool_calls": calls} for calls in (first, second)))
    url = open_server(tools=True)
    (result,), requests = play(url, answers, {**ROW, "prompt": "Guess."}, action="tools", prompt_field="prompt")
    assert (result.reward, result.metrics["turns"], result.metrics["invalid_actions"]) == (1.25, 2.0, 1.0)
    (tool,) = requests[0]["tools"]
    assert (tool["type"], tool["function"]["name"], tool["function"]["description"]) == ("function", "guess", "Guesses.")
    assert "letter" in tool["function"]["parameters"]["properties"]
    assert requests[0]["messages"] == [{"role": "user", "content": "Guess."}]
    answered = {message["tool_call_id"]: message["content"] for message in requests[1]["messages"] if message["role"] == "tool"}
    assert answered["1"] == "wrong"
    assert "lose" in answered["2"]
    assert "JSON object" in answered["3"]


def test_an_answer_without_a_call_ends_an_episode_of_tools(open_server: Callable[..., str]) -> None:
    (result,), requests = play(
        open_server(tools=True), in_turn("I am done."), {"seed": 0, "task": "Guess."}, action="tools", prompt_field="task"
    )
    assert (result.reward, result.metrics["done"], len(requests)) == (0.0, 1.0, 1)


def test_episodes_wait_for_room_on_a_full_server(open_server: Callable[..., str]) -> None:
    results, _ = play(open_server(max_concurrent=1), in_turn("b"), num_episodes=3)
    assert [result.reward for result in results] == [1.0] * 3


def test_a_field_that_the_servers_action_lacks_ends_the_run(open_server: Callable[..., str]) -> None:
    with pytest.raises(PluginError, match="action_field: found 'code'.*message: Field required"):
        play(open_server(), in_turn("b"), action_field="code")


def test_an_error_of_the_game_fails_the_episode(open_server: Callable[..., str]) -> None:
    with pytest.raises(RewardError, match="crashed.*EXECUTION_ERROR"):
        play(open_server(), in_turn("crash"))


def test_episodes_spread_over_the_servers_and_leave_them_empty() -> None:
    one, two = GameServer(2), GameServer(2)
    with serving("GET", "/ws", one.handle) as first, serving("GET", "/ws", two.handle) as second:
        results, _ = play((first, second), in_turn("b"), num_episodes=4, max_concurrent=2)
    assert len(results) == 4
    assert (one.num_refused, two.num_refused, one.num_open, two.num_open) == (0, 0, 0, 0)
    assert [len([message for message in server.heard if message["type"] == "reset"]) for server in (one, two)] == [2, 2]


def test_a_server_that_stays_full_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the time to connect is over, which passes here as it refuses for the second time."""
    server = GameServer(max_concurrent=0)
    monkeypatch.setattr(environment, "time", SimpleNamespace(monotonic=lambda: 0.0 if server.num_refused < 2 else 60.0))
    with (
        serving("GET", "/ws", server.handle) as url,
        pytest.raises(RewardError, match="CAPACITY_REACHED.*max_concurrent"),
    ):
        play(url, in_turn("b"), connect_timeout_s=30.0)
    assert server.num_refused == 2


@pytest.mark.parametrize(
    ("row", "options", "told"),
    [
        ({"seed": 5, "prompt": "p"}, {}, {"seed": 5, "prompt": "p"}),
        ({"prompt": "p"}, {}, {"seed": 7, "prompt": "p"}),
        ({"seed": 5, "prompt": "p", "hint": "h"}, {"reset_fields": ("hint",)}, {"seed": 5, "hint": "h"}),
    ],
)
def test_a_server_is_reset_with_the_fields_of_the_row(row: Row, options: dict[str, Any], told: dict[str, Any]) -> None:
    server = GameServer()
    with serving("GET", "/ws", server.handle) as url:
        play(url, in_turn("a", "b", "c"), row, **options)
    assert server.heard[0] == {"type": "reset", "data": told}


def test_a_row_that_is_no_json_is_refused() -> None:
    with pytest.raises(DataError, match="bytes.*reset_fields"):
        play("http://127.0.0.1:9", in_turn("b"), {"image": b"x"})


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"prompt_field": "task"}, "prompt_field.*'task' is None"),
        ({"observation_fields": ("words",)}, "observation_fields.*'words'.*'text', 'left'"),
        ({"action": "tools"}, "environment.openenv.action"),
    ],
)
def test_options_that_do_not_fit_the_server_end_the_run(options: dict[str, Any], names: str) -> None:
    replies = {"step": json.dumps({"type": "observation", "data": {"observation": {"text": ""}}})}
    server = GameServer(replies=replies)
    with serving("GET", "/ws", server.handle) as url, pytest.raises(PluginError, match=names):
        play(url, in_turn("b"), **options)


def test_a_reset_without_anything_to_read_ends_the_run() -> None:
    server = GameServer(tools=True)
    with serving("GET", "/ws", server.handle) as url, pytest.raises(PluginError, match="prompt_field"):
        play(url, in_turn("b"))


def test_a_reset_that_is_done_fails_the_episode() -> None:
    server = GameServer(replies={"reset": '{"type": "observation", "data": {"observation": {"text": "x"}, "done": true}}'})
    with serving("GET", "/ws", server.handle) as url, pytest.raises(RewardError, match="reset.*done"):
        play(url, in_turn("b"))


def test_a_conversation_without_room_ends_with_its_rewards() -> None:
    server = GameServer()
    with serving("GET", "/ws", server.handle) as url:
        (result,), _ = play(url, in_turn("a", (400, "context_length_exceeded")))
        assert (result.reward, result.metrics["too_long"], result.metrics["done"]) == (0.25, 1.0, 0.0)
        with pytest.raises(RewardError, match="max_prompt_tokens"):
            play(url, in_turn((400, "context_length_exceeded")))


def test_a_policy_that_is_busy_is_asked_again_and_one_that_refuses_fails_the_episode() -> None:
    server, busy = GameServer(), iter([(429, None), "b"])
    with serving("GET", "/ws", server.handle) as url:
        (result,), requests = play(url, lambda _: next(busy))
        assert (result.reward, len(requests)) == (1.0, 2)
        with pytest.raises(RewardError, match="status 401.*session_finished"):
            play(url, in_turn((401, "session_finished")))


def test_an_episode_that_is_cancelled_leaves_the_server() -> None:
    server = GameServer()
    asked = asyncio.Event()

    async def hang(_: Any) -> Any:
        loop.call_soon_threadsafe(asked.set)
        await asyncio.sleep(60)

    async def cancel() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        backend = OpenEnvBackend(EnvironmentContext(seed=0), OpenEnvConfig(urls=(url,)))
        episode = asyncio.create_task(backend.run(ROW, 7, SessionEndpoint(base_url=policy, api_key="key", model="policy")))
        await asked.wait()
        assert server.num_open == 1
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        while server.num_open:
            await asyncio.sleep(0.01)

    loop: asyncio.AbstractEventLoop
    with serving("GET", "/ws", server.handle) as url, serving("POST", "/chat/completions", hang) as policy:
        asyncio.run(asyncio.wait_for(cancel(), 300))


def test_rows_are_seeds_or_those_of_the_recipe() -> None:
    backend = OpenEnvBackend(EnvironmentContext(seed=0), OpenEnvConfig(urls=("http://h",), num_train=3, num_evaluation=2))
    assert list(backend.rows("train") or ()) == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert list(backend.rows("evaluation") or ()) == [{"seed": FIRST_EVALUATION_SEED + n} for n in range(2)]
    backend = OpenEnvBackend(EnvironmentContext(seed=0), OpenEnvConfig(urls=("http://h",), num_evaluation=2))
    assert backend.rows("train") is None
    assert backend.rows("evaluation") is None


def test_a_run_trains_on_episodes_of_a_server(tmp_path: Path) -> None:
    registry = Registry.from_providers(
        {"trainer": [FAKE_TRAINER], "generator": [FAKE_GENERATOR], "algorithm": [FAKE_ALGORITHM], "environment": [OPENENV]}
    )
    server, recipe = GameServer(max_concurrent=8), tmp_path / "recipe.toml"
    with serving("GET", "/ws", server.handle) as url:
        recipe.write_text(RECIPE.format(url=url))
        plan = prepare(recipe, [f"run.directory={tmp_path / 'runs'}", "run.name=run"], registry=registry)
        summary = train(plan, resume=False, progress=Progress(), tokenizer=FakeTokenizer())
    assert summary["steps"] == 2
    seeds = [message["data"]["seed"] for message in server.heard if message["type"] == "reset"]
    assert sorted(seeds) == [0, 0, 1, 1, 2, 2, 3, 3]
    records = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    turns = [record["environment/turns"] for record in records if "environment/turns" in record]
    assert len(turns) == 2
    assert all(1 <= mean <= 3 for mean in turns)

"""Episodes on servers that speak as NeMo Gym's do, and on its own where they are installed; the policy is a real session."""

import asyncio
import gzip
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import DataError, EnvironmentContext, EpisodeResult, RewardError, Row, SessionEndpoint
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_GENERATOR, FAKE_TRAINER
from rlcore_nemo_gym.config import NemoGymConfig
from rlcore_nemo_gym.environment import NemoGymBackend
from rlcore_nemo_gym.provider import NEMO_GYM
from rlcore_serve.sessions.interface import Segment
from rlcore_serve.sessions.server import serving as serving_sessions
from rlcore_serve.sessions.session import Sessions

from ..serving.sessions.chat_model import END, ChatMl, Script, served  # type: ignore[import-not-found]
from .gym_servers import TOOL, Gym, free_port, row, serving

PYTHON = os.environ.get("RLCORE_NEMO_GYM_PYTHON")
REAL = pytest.mark.skipif(PYTHON is None, reason="RLCORE_NEMO_GYM_PYTHON names no Python with nemo-gym 0.4")
CALL = f'<tool_call>{{"name": "double", "arguments": {{"n": 4}}}}</tool_call>{END}'
RECIPE = """
[model]
path = "none"
[algorithm]
name = "fake"
[environment]
name = "nemo_gym"
[environment.nemo_gym]
train_files = ["{file}"]
head_url = "{url}"
policy_port = {port}
[run]
num_steps = 1
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
OpenGym = Callable[[int], str]


@pytest.fixture
def gym() -> Iterator[Gym]:
    gym = Gym(f"http://127.0.0.1:{free_port()}/v1")
    with serving(gym):
        yield gym


@contextmanager
def real_servers(policy_url: str) -> Iterator[str]:
    command = [str(PYTHON), str(Path(__file__).with_name("real_servers.py")), policy_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            yield program.stdout.readline().strip()
        finally:
            program.kill()


@pytest.fixture(params=["protocol", pytest.param("real", marks=REAL)])
def open_gym(request: pytest.FixtureRequest) -> Iterator[OpenGym]:
    """Starts servers whose policy is at a port, and returns the head server's address."""
    with ExitStack() as stack:

        def start(port: int) -> str:
            url = f"http://127.0.0.1:{port}/v1"
            return stack.enter_context(real_servers(url) if request.param == "real" else serving(Gym(url)))

        yield start


class Played:
    """What became of one episode."""

    def __init__(self, backend: NemoGymBackend, script: Script, task: Row, **options: Any) -> None:
        sessions = Sessions()
        with serving_sessions(served(script, **options), sessions) as address:
            session = sessions.open(max_tokens=200)
            endpoint = SessionEndpoint(base_url=f"{address}/{session.token}/v1", api_key=session.token, model="policy")
            try:
                self.result: EpisodeResult = asyncio.run(asyncio.wait_for(backend.run(task, 7, endpoint), 300))
            finally:
                backend.close()
        self.segments: list[Segment] = sessions.finish(session)

    def said(self) -> list[str]:
        """What is in the loss of each sequence."""
        return [ChatMl().show(segment.tokens[segment.loss_mask].tolist()) for segment in self.segments]


def backend_of(gym: Gym, **options: Any) -> NemoGymBackend:
    port = int(gym.policy_url.split(":")[2].removesuffix("/v1"))
    defaults: dict[str, Any] = {"head_url": gym.url, "policy_port": port}
    return NemoGymBackend(EnvironmentContext(seed=0), NemoGymConfig(**defaults | options))


def test_an_episode_with_calls_is_one_sequence_and_has_the_verifiers_reward(open_gym: OpenGym) -> None:
    port = free_port()
    config = NemoGymConfig(head_url=open_gym(port), policy_port=port, metrics=("called", "is_right"))
    script = Script(CALL, f"that is 8{END}")
    played = Played(NemoGymBackend(EnvironmentContext(seed=0), config), script, row())
    assert (played.result.reward, played.result.success) == (1.0, True)
    assert played.result.metrics == {"called": 1.0, "is_right": 1.0, "answers": 2.0, "too_long": 0.0}
    assert played.said() == [f"{CALL}that is 8{END}"]
    assert '{"doubled":8}' in ChatMl().show(script.requests[1].prompt.tolist()).replace(": ", ":")


def test_a_prompt_without_room_ends_the_episode_with_the_verifiers_reward(open_gym: OpenGym) -> None:
    port = free_port()
    backend = NemoGymBackend(EnvironmentContext(seed=0), NemoGymConfig(head_url=open_gym(port), policy_port=port))
    script, task = Script(CALL), row()
    tool = {"type": "function", "function": {"name": "double", "parameters": TOOL["parameters"]}}
    prompt = ChatMl().render_chat([{"role": "user", "content": "what is twice 4?"}], [tool])
    room = len(ChatMl().encode(f"{prompt}{CALL}")) + 10
    played = Played(backend, script, task, max_sequence_length=room)
    assert (played.result.reward, played.result.success) == (0.0, False)
    assert played.result.metrics == {"answers": 1.0, "too_long": 1.0}
    assert played.said() == [CALL]


def test_the_agent_gets_the_row_with_its_episode_and_without_what_is_left_out(gym: Gym) -> None:
    Played(backend_of(gym), Script(f"8{END}"), row())
    (task,) = gym.tasks
    params = task.pop("responses_create_params")
    assert task == {name: value for name, value in row().items() if name != "responses_create_params"}
    assert params.pop("metadata").keys() == {"source", "rlcore_episode"}
    assert params.keys() == {"input", "tools"}
    Played(backend_of(gym, leave_out=("tools", "temperature", "parallel_tool_calls", "metadata")), Script(f"8{END}"), row())
    assert gym.tasks[1]["responses_create_params"]["metadata"].keys() == {"rlcore_episode"}


def test_the_agent_may_be_named_by_the_recipe_or_be_an_address(gym: Gym) -> None:
    task = {name: value for name, value in row().items() if name != "agent_ref"}
    for options in ({"agent": "double_simple_agent"}, {"agent_url": f"{gym.url}/", "head_url": "http://127.0.0.1:1"}):
        assert Played(backend_of(gym, **options), Script(f"8{END}"), task).result.reward == 1.0


def test_an_agent_server_that_is_not_there_fails_the_episode_alone(gym: Gym) -> None:
    with pytest.raises(RewardError, match=r"agent_ref None.*environment.nemo_gym.agent"):
        Played(backend_of(gym), Script(), {name: value for name, value in row().items() if name != "agent_ref"})
    with pytest.raises(RewardError, match="'other'.*'double_simple_agent'"):
        Played(backend_of(gym, agent="other"), Script(), row())
    gym.instances = "[]"
    with pytest.raises(RewardError, match="'double_simple_agent'; it has none"):
        Played(backend_of(gym), Script(), row())
    gym.instances = "[" * 100_000
    with pytest.raises(RewardError, match="nested too deeply"):
        Played(backend_of(gym), Script(), row())


def test_episodes_at_once_are_told_apart(gym: Gym) -> None:
    backend, sessions = backend_of(gym), Sessions()
    scripts = [Script(f"{number}{END}") for number in (8, 9, 8)]

    async def run_all(stack: ExitStack) -> list[EpisodeResult]:
        endpoints = []
        for script in scripts:
            address, session = stack.enter_context(serving_sessions(served(script), sessions)), sessions.open()
            endpoints.append(SessionEndpoint(base_url=f"{address}/{session.token}/v1", api_key=session.token, model="policy"))
        return await asyncio.gather(*(backend.run(row(), 0, endpoint) for endpoint in endpoints))

    with ExitStack() as stack:
        results = asyncio.run(asyncio.wait_for(run_all(stack), 300))
        backend.close()
    assert [result.reward for result in results] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((500, "it broke"), "status 500: it broke"),
        ((200, "<html>"), "no JSON that can be read: <html>"),
        ((200, "[1]"), r"\[1\].*`reward`"),
        ((200, "[" * 100_000), r"no JSON that can be read: \[\["),
        ((307, "", ("Location", "/verify")), "status 307"),
        ((200, gzip.compress(bytes(2**21)), ("Content-Encoding", "gzip")), "more than 1048576 bytes"),
    ],
)
def test_a_server_that_fails_fails_the_episode(
    gym: Gym, reply: tuple[Any, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlcore_nemo_gym.agent_servers.MAX_REPLY_BYTES", 2**20)
    gym.reply = reply
    with pytest.raises(RewardError, match=said) as caught:
        Played(backend_of(gym), Script(), row())
    assert gym.url in str(caught.value)


def test_what_the_policy_refused_is_said(gym: Gym) -> None:
    task = row()
    task["responses_create_params"]["background"] = True
    with pytest.raises(RewardError, match=r"status 500.*background: found true"):
        Played(backend_of(gym), Script(), task)


def test_a_first_prompt_without_room_is_judged_without_an_answer(gym: Gym) -> None:
    played = Played(backend_of(gym), Script(), row(), max_sequence_length=10)
    assert (played.result.reward, played.result.metrics) == (0.0, {"answers": 0.0, "too_long": 1.0})
    assert played.said() == []
    gym.verdict = {"reward": None}
    with pytest.raises(RewardError, match="reward None"):
        Played(backend_of(gym), Script(), row(), max_sequence_length=10)


def test_an_agent_may_make_the_input_and_rows_may_have_a_developer(gym: Gym) -> None:
    task = row()
    gym.policy_input = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "twice 4?"}]
    task["responses_create_params"]["input"] = []
    script = Script(f"8{END}")
    assert Played(backend_of(gym), script, task).result.reward == 1.0
    assert ChatMl().show(script.requests[0].prompt.tolist()).count("<|im_start|>system\nBe kind.") == 1
    as_it_is = Script(f"8{END}")
    Played(backend_of(gym, developer_as_system=False), as_it_is, task)
    assert "<|im_start|>developer\nBe kind." in ChatMl().show(as_it_is.requests[0].prompt.tolist())


def test_requests_for_other_routes_are_said(gym: Gym) -> None:
    gym.policy_path = "/chat/completions"
    with pytest.raises(RewardError, match=r"status 500.*POST /v1/chat/completions; expected POST /v1/responses"):
        Played(backend_of(gym), Script(), row())
    gym.hands_on_metadata = False
    with pytest.raises(RewardError, match=rf"{gym.policy_url}.*POST /v1/chat/completions; expected POST /v1/responses"):
        Played(backend_of(gym), Script(), row())


def test_an_agent_that_does_not_ask_the_policy_is_an_error(gym: Gym) -> None:
    gym.reply = (200, '{"reward": 1.0}')
    with pytest.raises(RewardError, match=f"{gym.policy_url}.*openai_base_url"):
        Played(backend_of(gym), Script(), row())
    gym.reply, gym.hands_on_metadata = None, False
    with pytest.raises(RewardError, match="without metadata.rlcore_episode"):
        Played(backend_of(gym), Script(), row())


def test_a_judge_that_asks_the_policy_is_an_error(gym: Gym) -> None:
    gym.judges_with_policy = True
    with pytest.raises(RewardError, match="status 500.*without metadata.rlcore_episode.*judges"):
        Played(backend_of(gym), Script(f"8{END}"), row())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"reward": None}, "reward None"),
        ({"reward": float("nan")}, "reward nan"),
        ({"_ng_failure_class": "judge_failed"}, "_ng_failure_class is 'judge_failed'"),
        ({"reward_components": {"a": "b"}}, "reward_components {'a': 'b'}"),
        ({"steps": "x"}, "'x' as 'steps'.*environment.nemo_gym.metrics"),
        ({}, "None as 'steps'"),
    ],
)
def test_a_reply_without_figures_is_an_error(gym: Gym, more: dict[str, Any], said: str) -> None:
    gym.verdict = more
    with pytest.raises(RewardError, match=said):
        Played(backend_of(gym, metrics=("steps",)), Script(f"8{END}"), row())


def test_components_of_the_reward_are_kept(gym: Gym) -> None:
    gym.verdict = {"reward": 0.5, "reward_components": {"form": 1.0, "value": 0.0}}
    result = Played(backend_of(gym, success_reward=0.5), Script(f"8{END}"), row()).result
    assert (result.reward, result.success, result.reward_components) == (0.5, True, {"form": 1.0, "value": 0.0})


def test_servers_that_are_not_there_are_named(gym: Gym) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RewardError, match=f"head server {nowhere}.*environment.nemo_gym"):
        Played(backend_of(gym, head_url=nowhere), Script(), row())
    with pytest.raises(RewardError, match=f"agent server {nowhere}.*environment.nemo_gym"):
        Played(backend_of(gym, agent_url=nowhere), Script(), row())
    with pytest.raises(RewardError, match="/server_instances.*status 404"):
        Played(backend_of(gym, head_url=f"{gym.url}/other"), Script(), row())


def test_rows_that_no_server_can_be_sent_are_errors(gym: Gym) -> None:
    with pytest.raises(DataError, match="'prompt'.*responses_create_params"):
        Played(backend_of(gym), Script(), {"prompt": "a"})
    with pytest.raises(DataError, match="JSON"):
        Played(backend_of(gym), Script(), row() | {"value": {1, 2}})


def test_an_episode_that_is_cancelled_leaves_the_agent_server(gym: Gym) -> None:
    script, sessions = Script(f"8{END}"), Sessions()
    script.waits = True
    backend = backend_of(gym)

    async def cancel(endpoint: SessionEndpoint) -> None:
        episode = asyncio.create_task(backend.run(row(), 7, endpoint))
        while not script.requests:
            await asyncio.sleep(0.01)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        while gym.num_running:
            await asyncio.sleep(0.01)

    with serving_sessions(served(script), sessions) as address:
        session = sessions.open()
        endpoint = SessionEndpoint(base_url=f"{address}/{session.token}/v1", api_key=session.token, model="policy")
        asyncio.run(asyncio.wait_for(cancel(endpoint), 300))
        script.waits = False
        backend.close()
    assert sessions.finish(session) == []


def test_rows_come_from_files_or_the_recipe(gym: Gym, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row()) + "\n")
    backend = backend_of(gym, train_files=(str(file),))
    assert list(backend.rows("train") or ()) == [row()]
    assert backend.rows("evaluation") is None
    backend.close()
    backend = backend_of(gym, evaluation_files=(str(tmp_path / "nowhere"),))
    with pytest.raises(DataError, match="environment.nemo_gym.evaluation_files.*nowhere"):
        backend.rows("evaluation")
    backend.close()


def test_a_run_trains_on_episodes_of_the_servers(gym: Gym, tmp_path: Path) -> None:
    registry = Registry.from_providers(
        {"trainer": [FAKE_TRAINER], "generator": [FAKE_GENERATOR], "algorithm": [FAKE_ALGORITHM], "environment": [NEMO_GYM]}
    )
    file, recipe = tmp_path / "rows.jsonl", tmp_path / "recipe.toml"
    tasks = [row(f"what is twice {number}?", str(2 * number)) for number in range(4)]
    for task in tasks:
        del task["responses_create_params"]["tools"]
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    port = gym.policy_url.split(":")[2].removesuffix("/v1")
    recipe.write_text(RECIPE.format(file=file, url=gym.url, port=port))
    plan = prepare(recipe, [f"run.directory={tmp_path / 'runs'}", "run.name=run"], registry=registry)
    summary = train(plan, resume=False, progress=Progress(), tokenizer=FakeTokenizer())
    assert summary["steps"] == 1
    assert len({task["responses_create_params"]["metadata"]["rlcore_episode"] for task in gym.tasks}) == 4
    records = [json.loads(line) for line in (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]
    (step,) = (record for record in records if "environment/answers" in record)
    assert (step["environment/answers"], step["environment/segments_per_episode"]) == (1.0, 1.0)

"""Steps of agents: several sequences an episode, deadlines, failures that end the run or are masked."""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from rlcore.run.protocols import CollectedRollouts
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.metrics import rollout_metrics, throughput_metrics
from rlcore.spi import (
    EPISODE_IDS,
    GENERATION_LOGPROBS,
    WEIGHT_VERSIONS,
    EpisodeResult,
    RewardError,
    Row,
    SamplingParams,
    SessionEndpoint,
    WorkerError,
)
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout import group_work, request_queue
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.evaluation import evaluation_metrics
from rlcore_rollout.rollout_table import rollout_table
from rlcore_rollout.schedule import Schedule, SchedulePolicy
from rlcore_rollout.step_plans import Draws, StepPlan
from rlcore_serve.agents.collector import AgentSampler
from rlcore_serve.agents.groups import AgentGroups
from rlcore_serve.sessions.interface import Sample, Sampler, SampleRequest, SessionContext, SessionServer, session_server

from ...rollout.test_sampler import Notes, Speller  # type: ignore[import-not-found]

ROWS = [{"prompt": "a"}, {"prompt": "b"}]
Play = Callable[[Row, SessionEndpoint], Awaitable[EpisodeResult]]


def post(session: SessionEndpoint, *texts: str, model: str = "policy") -> str:
    """The answer to a chat of these messages, of the user and the assistant in turn."""
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    body = json.dumps({"model": model, "messages": messages}).encode()
    request = urllib.request.Request(f"{session.base_url}/chat/completions", data=body)
    with urllib.request.urlopen(request, timeout=300) as response:
        content: str = json.loads(response.read())["choices"][0]["message"]["content"]
        return content


async def ask(session: SessionEndpoint, *texts: str) -> str:
    return await asyncio.to_thread(post, session, *texts)


class Agents:
    """An AgentEnvironment that plays by a function."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        return await self._play(row, session)

    def rows(self, split: str) -> None:
        return None


@pytest.fixture
def make() -> Any:
    """Makes a collector of agents that play so."""
    runners = []

    def build(play: Play, on_error: Any = "error", timeout_s: float = 20.0, **options: Any) -> AgentSampler:
        runners.append(EpisodeRunner(Agents(play), timeout_s, on_error))
        defaults: dict[str, Any] = {
            "generator": Speller(),
            "episodes": runners[-1],
            "tokenizer": FakeTokenizer(),
            "sampling": SamplingParams(stop_token_ids=(0,)),
            "samples_per_prompt": 2,
            "server": session_server,
            "max_sequence_length": 200,
            "max_response_tokens": 5,
            "max_failed_fraction": 0.5,
            "history": "refuse",
            "trains": True,
            "tool_parser": None,
            "purpose": "the step",
            "progress": Notes(),
        }
        return AgentSampler(clock=PhaseClock(Progress()), **{**defaults, **options})

    yield build
    for runner in runners:
        runner.close()


@pytest.fixture
def collect(make: Any) -> Any:
    """Collects a step of such agents."""

    def call(play: Play, *arguments: Any, **options: Any) -> CollectedRollouts:
        collected: CollectedRollouts = make(play, *arguments, **options).collect(ROWS, 7, (1, 2, 3))
        return collected

    return call


async def branching(row: Row, session: SessionEndpoint) -> EpisodeResult:
    """Two sequences for the first row, where a second turn follows the first and another begins anew; one for the other."""
    first = await ask(session, row["prompt"])
    if row["prompt"] == "a":
        await ask(session, "a", first, "more")
        await ask(session, "c", "mine", "more")
    parts = {"letters": float(len(first))}
    return EpisodeResult(reward=parts["letters"], success=row["prompt"] == "a", metrics={"turns": 2.0}, reward_components=parts)


def test_an_episode_has_a_sequence_for_each_of_its_conversations(collect: Any) -> None:
    found = collect(branching)
    batch = found.batch
    assert batch.sequence_columns[EPISODE_IDS].tolist() == [0, 0, 1, 1, 2, 3]
    assert found.group_ids.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.first_sequences.tolist() == [0, 2, 4, 5]
    assert found.episode_of.tolist() == [0, 0, 1, 1, 2, 3]
    assert found.rewards[0] == found.rewards[1]
    np.testing.assert_array_equal(found.reward_components["letters"], found.rewards)
    text = FakeTokenizer().show(batch.tokens[: batch.offsets[1]])
    assert text.startswith("user: a\nassistant: ")
    versions = batch.token_columns[WEIGHT_VERSIONS]
    assert set(versions[batch.loss_mask].tolist()) == {7}
    assert set(versions[~batch.loss_mask].tolist()) == {-1}
    np.testing.assert_array_equal(
        batch.token_columns[GENERATION_LOGPROBS], np.where(batch.loss_mask, -batch.tokens.astype(np.float32), 0)
    )  # as Speller reports them
    metrics = rollout_metrics(found)
    firsts = found.rewards[found.first_sequences]
    assert metrics["reward_mean"] == pytest.approx(firsts.mean())
    assert (metrics["success_rate"], metrics["environment/turns"]) == (0.5, 2.0)
    assert metrics["environment/segments_per_episode"] == 1.5
    assert metrics["response_length_mean"] == batch.loss_mask.sum() / 4
    assert throughput_metrics(found, 1.0)["generated_tokens_per_second"] == 4 * metrics["response_length_mean"]
    assert rollout_table(1, found, [""] * 6)["episode"].to_pylist() == [0, 0, 1, 1, 2, 3]
    assert rollout_table(1, found, [""] * 6)["reward/letters"].to_pylist() == found.rewards.tolist()
    assert metrics["reward/letters"] == pytest.approx(firsts.mean())
    assert evaluation_metrics(found)["eval/pass@1"] == 0.5


def test_a_generator_that_is_stopped_costs_agents_no_time(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [100.0]
    monkeypatch.setattr(request_queue, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(group_work, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    policy = SchedulePolicy(groups_per_step=2, num_steps=1)
    work = make(branching).run_of(Schedule(policy), lambda _: StepPlan(rows=ROWS, draws=Draws((1,), 2, 2))).collectors.work
    times = []
    for is_generating in (True, False, True):
        work.count.generating(is_generating)
        times.append(work.now())
        seconds[0] += 10.0
    assert [*times, work.now()] == [100.0, 110.0, 110.0, 120.0]


def test_a_step_is_repeated_token_for_token(collect: Any) -> None:
    first, again = collect(branching), collect(branching)
    np.testing.assert_array_equal(first.batch.tokens, again.batch.tokens)


def test_an_agent_that_never_asks_has_a_reward_and_nothing_to_learn(collect: Any) -> None:
    async def silent(row: Row, session: SessionEndpoint) -> EpisodeResult:
        return EpisodeResult(reward=3.0)

    found = collect(silent)
    assert found.rewards.tolist() == [3.0] * 4
    assert found.valid.all()
    assert not found.batch.loss_mask.any()
    assert found.batch.num_sequences == 4
    assert not found.truncated.any()


class Clock:
    """The time of agents, which stands still until their test sets it."""

    now_s = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "now_s", 0.0)
    monkeypatch.setattr(AgentGroups, "now", lambda _: Clock.now_s)


def failing(kind: str) -> Play:
    """Agents whose second row fails, after it has asked. Those that hang do so until the others have ended, and then for an
    hour."""
    num_ended = 0

    async def play(row: Row, session: SessionEndpoint) -> EpisodeResult:
        nonlocal num_ended
        await ask(session, row["prompt"])
        if row["prompt"] == "b":
            if kind == "raises":
                raise ConnectionError("no tool")
            if kind == "hangs":
                while num_ended < 2:
                    await asyncio.sleep(0.01)
                Clock.now_s += 3600
                await asyncio.sleep(3600)
            return EpisodeResult(reward=float("nan"))
        num_ended += 1
        return EpisodeResult(reward=1.0)

    return play


@pytest.mark.parametrize(("kind", "names"), [("raises", "no tool"), ("hangs", "environment_timeout_s"), ("nan", "nan")])
@pytest.mark.usefixtures("clock")
def test_failures_end_the_run_or_are_masked(collect: Any, kind: str, names: str) -> None:
    with pytest.raises(RewardError, match=names):
        collect(failing(kind))
    notes = Notes()
    found = collect(failing(kind), "mask", progress=notes)
    assert found.valid.tolist() == [True, True, False, False]
    assert found.rewards.tolist() == [1.0, 1.0, 0.0, 0.0]
    starts = found.batch.offsets[2]
    assert found.batch.loss_mask[:starts].any()
    assert not found.batch.loss_mask[starts:].any()
    assert "2 of 4 samples" in notes.notes[0]
    assert names in notes.notes[0]


def test_too_many_failures_end_the_run_all_the_same(collect: Any) -> None:
    with pytest.raises(RewardError, match="max_failed_fraction"):
        collect(failing("raises"), "mask", max_failed_fraction=0.25)


def test_a_generator_that_fails_ends_the_step_and_its_agents(collect: Any) -> None:
    class Broken(Speller):
        def generate(self, request: Any) -> Any:
            raise WorkerError("the engine is gone")

    seen: list[BaseException] = []

    async def play(row: Row, session: SessionEndpoint) -> EpisodeResult:
        try:
            await ask(session, row["prompt"])
        except BaseException as error:
            seen.append(error)
            raise
        return EpisodeResult(reward=1.0)

    with pytest.raises(WorkerError, match="gone"):
        collect(play, generator=Broken())


@pytest.mark.usefixtures("clock")
def test_agents_begin_again_where_one_blocks_their_event_loop(collect: Any) -> None:
    """The calls' own time stands still: only an event loop that does not turn is noticed."""
    begun: list[str] = []

    async def play(row: Row, session: SessionEndpoint) -> EpisodeResult:
        begun.append(row["prompt"])
        while begun.count("b") == 1 and row["prompt"] == "b":
            time.sleep(0.01)
        return EpisodeResult(reward=float(len(await ask(session, row["prompt"]))))

    found = collect(play, "mask", timeout_s=5.0)
    assert found.valid.tolist() == [True, True, False, True]
    assert begun.count("a") == 4
    baseline_run = collect(play)
    assert baseline_run.responses[:2] == found.responses[:2]
    assert baseline_run.responses[3] == found.responses[3]


class Stalling:
    """Says an episode's first answer alone: the second is sampled until its client hangs up."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self.num_stalled = sampler, 0

    async def sample(self, request: SampleRequest) -> Sample | None:
        if request.goes_on:
            self.num_stalled += 1
            await asyncio.Event().wait()
        return await self._sampler.sample(request)


def test_an_answer_on_which_the_agent_hangs_up_is_counted(collect: Any) -> None:
    """Only the second episode of each row hangs up."""
    stalling: list[Stalling] = []
    begun: list[str] = []

    def server(context: SessionContext) -> SessionServer:
        stalling.append(Stalling(context.sampler))
        return session_server(evolve(context, sampler=stalling[-1]))

    async def play(row: Row, session: SessionEndpoint) -> EpisodeResult:
        await ask(session, row["prompt"])
        begun.append(row["prompt"])
        if begun.count(row["prompt"]) == 2:
            address = urllib.parse.urlsplit(session.base_url)
            before = stalling[0].num_stalled
            client = http.client.HTTPConnection(address.netloc)
            body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "more"}]})
            client.request("POST", f"{address.path}/chat/completions", body)
            while stalling[0].num_stalled == before:
                await asyncio.sleep(0.01)
            client.close()
        return EpisodeResult(reward=1.0)

    episodes = EpisodeRunner(Agents(play), 300.0, "error", max_concurrent=1)
    try:
        found = collect(play, episodes=episodes, server=server)
    finally:
        episodes.close()
    assert found.environment_metrics["dropped_answers"] == 0.5
    assert found.environment_metrics["segments_per_episode"] == 1.0


def test_a_session_ends_with_its_episode(collect: Any) -> None:
    sessions: list[SessionEndpoint] = []
    codes: list[int] = []

    async def play(row: Row, session: SessionEndpoint) -> EpisodeResult:
        await ask(session, row["prompt"])
        for other in sessions:
            with pytest.raises(urllib.error.HTTPError) as caught:
                await ask(other, "a")
            codes.append(caught.value.code)
        sessions.append(session)
        return EpisodeResult(reward=1.0)

    episodes = EpisodeRunner(Agents(play), 20.0, "error", max_concurrent=1)
    try:
        collect(play, episodes=episodes)
    finally:
        episodes.close()
    assert codes == [401] * 6


@pytest.mark.parametrize(("compares", "expected"), [("rewards", False), ("turn_rewards", False), ("reward_components", True)])
def test_samples_of_agents_are_told_apart_by_what_is_compared(make: Any, compares: Any, expected: bool) -> None:
    schedule = Schedule(SchedulePolicy(groups_per_step=2, num_steps=1, max_staleness=0))
    nothing: Any = None
    groups = make(nothing, compares=compares).work_of(schedule, nothing, nothing)
    results = (
        EpisodeResult(reward=1.0, reward_components={"x": 1.0}),
        None,
        EpisodeResult(reward=1.0, reward_components={"y": 1.0}),
    )
    episodes = [SimpleNamespace(result=result) for result in results]
    assert groups.has_signal(SimpleNamespace(episodes=episodes)) is expected

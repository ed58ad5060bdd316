"""Agents whose generation goes ahead of training, with the fakes: ages, unfinished ones, failures, resume."""

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.storage.saver import RunSaver
from rlcore.spi import ConfigError, EpisodeResult, InterruptedRun, Row, SessionEndpoint, WorkerError, capabilities, hookimpl
from rlcore.testing.fakes.environment import FakeEnvironment
from rlcore.testing.fakes.policy import log_softmax, logits
from rlcore_rollout import environment_calls
from rlcore_rollout.schedule import Schedule

from ..core.run.conftest import FAKES, read_metrics  # type: ignore[import-not-found]
from .test_asynchrony import (  # type: ignore[import-not-found]
    STEPS,
    CountsSteps,
    Killed,
    Recording,
    Slow,
    Unhurried,
    Watched,
    ahead,
    prompts,
    rollouts,
)

pytest.importorskip("rlcore_serve", reason="sessions need a server")
from rlcore_serve.agents.groups import AgentGroups

Run = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.timeout(300)
SMALL = (
    "run.num_steps=5",
    "training.prompts_per_step=3",
    "rollout.samples_per_prompt=2",
    "rollout.max_prompt_tokens=160",
    "rollout.max_response_tokens=20",
    "evaluation.at_start=false",
    "evaluation.every_n_steps=0",
    "evaluation.at_end=false",
    "checkpoint.every_n_steps=1",
)
NUM_GROUPS = 5 * 3


async def ask(session: SessionEndpoint, *texts: str) -> str:
    """The answer to a chat of these messages, of the user and the assistant in turn."""
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    body = json.dumps({"model": session.model, "messages": messages}).encode()
    request = urllib.request.Request(f"{session.base_url}/chat/completions", data=body)

    def post() -> str:
        with urllib.request.urlopen(request, timeout=40) as response:
            content: str = json.loads(response.read())["choices"][0]["message"]["content"]
            return content

    return await asyncio.to_thread(post)


class Agents(FakeEnvironment):
    """Two turns, and for every other row a second answer to the first question."""

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        question = str(row["prompt"])
        first = await ask(session, question)
        second = await ask(session, question, first, "more")
        if question[0] in "acegikmoqsuwy":
            await ask(session, question, "mine", "again")
        return EpisodeResult(reward=float(len(set(first + second))))


@pytest.fixture
def agents(registry_with: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """The fakes with an environment whose agents run the episodes."""

    def build(environment: type = Agents, **others: type) -> Registry:
        monkeypatch.setitem(FAKES, "environment", evolve(FAKES["environment"], capabilities={capabilities.AGENT}))
        return registry_with(environment=environment, **others)

    return build


def require_each_prompt_once(directory: Path, number: int = NUM_GROUPS) -> None:
    assert set(prompts(directory).values()) == {1}
    assert prompts(directory).total() == number


def staleness(directory: Path) -> list[float]:
    return [record["async/staleness_max"] for record in read_metrics(directory) if "async/staleness_max" in record]


@pytest.mark.parametrize("overlaps", [False, True])
def test_each_token_has_the_log_probability_of_the_weights_that_it_names(
    run: Run, agents: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """By the fakes' own formula, in float64; answers that several versions said go on behind one another."""
    monkeypatch.setattr(RunPlan, "overlaps", overlaps)
    Recording.weights_of.clear()
    run(*ahead(2, *SMALL), registry=agents(trainer=Recording, generator=Unhurried))
    directory = tmp_path / "runs" / "run"
    assert 0 < max(staleness(directory)) <= 2
    require_each_prompt_once(directory)
    num_spanning = 0
    for sample in rollouts(directory).itertuples():
        tokens, mask = np.asarray(sample.tokens), np.asarray(sample.loss_mask)
        versions = np.asarray(sample.weight_versions)
        assert versions[mask].max() <= sample.step - 1
        num_spanning += len(set(versions[mask])) > 1
        for place in np.flatnonzero(mask):
            context = (tokens[:1], tokens[place - 1 : place], np.array([place]))
            expected = log_softmax(logits(Recording.weights_of[int(versions[place])], *context))[0, tokens[place]]
            assert sample.generation_logprobs[place] == pytest.approx(expected, abs=1e-5)
    assert num_spanning > 0


def test_truncated_samples_of_agents_have_the_trainers_probabilities(
    run: Run, agents: Callable[..., Registry], tmp_path: Path
) -> None:
    """Over the tokens that their sampling had kept, in every branch of a session."""
    run(*STEPS, *SMALL, "rollout.top_p=0.8", "trainer.fake.initial_scale=0.5", "run.num_steps=3", registry=agents())
    compared = [record for record in read_metrics(tmp_path / "runs" / "run") if "importance_ratio" in record]
    assert compared
    for record in compared:
        assert record["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
    table = rollouts(tmp_path / "runs" / "run")
    assert any(len(kept) > 0 for sample in table["sampling_mask"] for kept in sample)


def test_no_staleness_is_the_run_without_the_section(run: Run, agents: Callable[..., Registry], tmp_path: Path) -> None:
    registry = agents()
    run(*STEPS, *SMALL, "run.name=plain", registry=registry)
    run(*ahead(0, *SMALL), "run.name=zero", registry=registry)
    plain, zero = (rollouts(tmp_path / "runs" / name) for name in ("plain", "zero"))
    assert plain["response"].tolist() == zero["response"].tolist()
    assert read_metrics(tmp_path / "runs" / "plain") == read_metrics(tmp_path / "runs" / "zero")


def test_what_agents_do_is_replayed_by_no_schedule(run: Run, agents: Callable[..., Registry], tmp_path: Path) -> None:
    options, schedule = ahead(1, *SMALL, "run.num_steps=1"), tmp_path / "runs" / "run" / "schedule.jsonl"
    run(*options, registry=agents())
    assert not schedule.exists()
    with pytest.raises(ConfigError) as raised:
        run(*options, "run.name=again", registry=agents(), replay_schedule=schedule)
    assert [problem.path for problem in raised.value.problems] == ["environment"]


class KillsAt:
    """Kills the work at one of all the events that change what a run knows of its groups, or what it has saved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = self.num_events = 0
        for owner, name in (
            (Schedule, "admit"),
            (Schedule, "end"),
            (Schedule, "take"),
            (Schedule, "train"),
            (RunSaver, "save"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **others: Any) -> Any:
            self.num_events += 1
            if self.num_events == self.at:
                raise Killed
            return method(*arguments, **others)

        return counted


@pytest.mark.wide(sample=4)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("event", [1, 9, 18, 27, 36, 47])
def test_a_run_that_is_killed_at_any_event_loses_and_repeats_no_prompt(
    run: Run,
    agents: Callable[..., Registry],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool,
    event: int,
) -> None:
    monkeypatch.setattr(RunPlan, "overlaps", overlaps)
    kills, options = KillsAt(monkeypatch), ahead(1, *SMALL, "environment.fake.prompt_length=2")
    kills.at = event
    with pytest.raises(Killed):
        run(*options, registry=agents(), resume=False)
    kills.at = 0
    run(*options, registry=agents(), resume=(tmp_path / "runs" / "run").exists())
    require_each_prompt_once(tmp_path / "runs" / "run")


def test_ctrl_c_keeps_what_has_ended(run: Run, agents: Callable[..., Registry], tmp_path: Path) -> None:
    options, registry = ahead(1, *SMALL, "checkpoint.every_n_steps=0"), agents()
    with pytest.raises(InterruptedRun, match="--resume"):
        run(*options, registry=registry, progress=Watched(2, 1))
    run(*options, registry=registry, resume=True)
    require_each_prompt_once(tmp_path / "runs" / "run")


class SlowAgents(Agents):
    """Those of prompts that begin with c, d, e or f wait for the end of a step between their two turns."""

    cancelled: ClassVar[set[str]] = set()
    awaited_step = 2

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        question = str(row["prompt"])
        try:
            answer = await ask(session, question)
            while question[0] in "cdef" and Slow.steps_done < self.awaited_step:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.add(question)
            raise
        return EpisodeResult(reward=float(len(await ask(session, question, answer, "more"))))


IN_ORDER = ("data.train.shuffle=false", "training.prompts_per_step=4", "run.num_steps=4", "checkpoint.every_n_steps=0")


def test_groups_beyond_the_bound_are_dropped_and_their_agents_cancelled(
    run: Run, agents: Callable[..., Registry], tmp_path: Path
) -> None:
    SlowAgents.cancelled.clear()
    options = ahead(0, *SMALL, *IN_ORDER, "async.on_stale=drop", "async.extra_prompts=4")
    run(*options, registry=agents(SlowAgents), progress=CountsSteps())
    directory = tmp_path / "runs" / "run"
    records = read_metrics(directory)
    assert {record["async/staleness_max"] for record in records} == {0.0}
    assert {question[0] for question in SlowAgents.cancelled} == set("cdef")
    assert sum(record["async/groups_dropped"] for record in records) >= 4
    assert not [prompt for prompt in prompts(directory) if prompt.removeprefix("user: ")[0] in "cdef"]
    assert max(prompts(directory).values()) == 1


def test_what_passes_the_bound_is_rescored(run: Run, agents: Callable[..., Registry], tmp_path: Path) -> None:
    options = ahead(0, *SMALL, *IN_ORDER, "async.on_stale=rescore", "async.extra_prompts=4")
    run(*options, registry=agents(SlowAgents), progress=CountsSteps())
    records = read_metrics(tmp_path / "runs" / "run")
    assert sum(record.get("async/tokens_rescored", 0.0) for record in records) > 0
    assert max(staleness(tmp_path / "runs" / "run")) > 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_evaluation_comes_between_the_turns_of_agents(
    run: Run, agents: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """They wait for samples that only come behind it."""
    monkeypatch.setattr(RunPlan, "overlaps", overlaps)
    options = ahead(1, *SMALL, "run.num_steps=3", "evaluation.every_n_steps=1", "environment.fake.num_evaluation_rows=4")
    run(*options, registry=agents(generator=Unhurried))
    records = read_metrics(tmp_path / "runs" / "run")
    assert sum("eval/reward_mean" in record for record in records) == 3
    require_each_prompt_once(tmp_path / "runs" / "run", number=9)


def test_restarted_episodes_are_of_one_version(run: Run, agents: Callable[..., Registry], tmp_path: Path) -> None:
    run(*ahead(1, *SMALL, "async.partial_rollouts=restart"), registry=agents(generator=Unhurried))
    directory = tmp_path / "runs" / "run"
    for _, episode in rollouts(directory).groupby(["step", "episode"]):
        versions = np.concatenate([np.asarray(one)[np.asarray(one) >= 0] for one in episode["weight_versions"]])
        assert len(set(versions.tolist())) == 1
    require_each_prompt_once(directory)


class Clings(Agents):
    """The first that is cancelled goes on all the same, and is over its time once all that were at work beside it have ended.
    The one in its place ends on another event loop alone."""

    TIMEOUT_S = 20.0
    now_s = 0.0
    """The time of agents, which stands still otherwise."""
    clinging: ClassVar[list[tuple[str, asyncio.AbstractEventLoop]]] = []
    at_work: ClassVar[set[object]] = set()

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        me, mark = (str(row["prompt"]), asyncio.get_running_loop()), object()
        self.at_work.add(mark)
        try:
            while me in self.clinging:
                await asyncio.sleep(0.01)
            answer = await ask(session, me[0])
            await asyncio.sleep(0.2)
            return EpisodeResult(reward=float(len(await ask(session, me[0], answer, "more"))))
        except asyncio.CancelledError:
            if not self.clinging:
                self.clinging.append(me)
                await self.cling(self.at_work - {mark})
            raise
        finally:
            self.at_work.discard(mark)

    async def cling(self, beside: set[object]) -> None:
        Clings.now_s = 0.6 * self.TIMEOUT_S  # for those that begin from now on, half of the time is left below
        while not beside.isdisjoint(self.at_work):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        Clings.now_s = 1.1 * self.TIMEOUT_S
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("masks", [True, False])
def test_an_agent_that_cannot_be_cancelled_is_not_taken_for_the_one_in_its_place(
    run: Run, agents: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masks: bool
) -> None:
    monkeypatch.setattr(environment_calls, "GRACE_S", 0.05)
    monkeypatch.setattr(AgentGroups, "now", lambda _: Clings.now_s)
    monkeypatch.setattr(Clings, "now_s", 0.0)
    Clings.clinging.clear()
    Clings.at_work.clear()
    restarting = "async.partial_rollouts=restart", f"rollout.environment_timeout_s={Clings.TIMEOUT_S}"
    options = ahead(1, *SMALL, *restarting, "run.num_steps=3")
    masked = ("rollout.on_environment_error=mask", "rollout.max_failed_fraction=1.0") if masks else ()
    run(*options, *masked, registry=agents(Clings, generator=Unhurried))
    directory = tmp_path / "runs" / "run"
    assert Clings.clinging
    assert rollouts(directory)["valid"].all()
    require_each_prompt_once(directory, number=9)


class EqualRewards(Agents):
    """Nothing can be learned from prompts that begin with a vowel."""

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        answer = await ask(session, str(row["prompt"]))
        return EpisodeResult(reward=0.0 if str(row["prompt"])[0] in "aeiou" else float(hash(answer) % 1000))


def test_groups_without_a_signal_are_replaced(run: Run, agents: Callable[..., Registry], tmp_path: Path) -> None:
    options = ahead(1, *SMALL, "data.train.shuffle=false", "rollout.dynamic_sampling=true", "rollout.max_refill_ratio=20")
    run(*options, registry=agents(EqualRewards))
    table = rollouts(tmp_path / "runs" / "run")
    assert (table.groupby(["step", "group"])["reward"].nunique() > 1).all()
    assert (table.groupby("step")["group"].nunique() == 3).all()
    assert sum(record["async/groups_refilled"] for record in read_metrics(tmp_path / "runs" / "run")) > 0


class Fails(Agents):
    """Has no tool for prompts that begin with a vowel, and finds that out late."""

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        result = await super().run(row, seed, session)
        if str(row["prompt"])[0] in "aeiou":
            raise ConnectionError("no tool")
        return result


def test_agents_that_fail_are_masked_and_counted(run: Run, agents: Callable[..., Registry], tmp_path: Path) -> None:
    masks = ("rollout.on_environment_error=mask", "rollout.max_failed_fraction=1.0", "data.train.shuffle=false")
    progress = Watched()
    run(*ahead(1, *SMALL, *masks), registry=agents(Fails), progress=progress)
    directory = tmp_path / "runs" / "run"
    table = rollouts(directory)
    failed = table["prompt"].str.removeprefix("user: ").str[0].isin(list("aeiou"))
    assert failed.any()
    assert (table["valid"] == ~failed).all()
    assert not any(np.asarray(mask).any() for mask in table[failed]["loss_mask"])
    assert any("no tool" in note for note in progress.notes)
    require_each_prompt_once(directory)


class Dies(Unhurried):
    """Once, with agents under way."""

    num_streams = 0

    @hookimpl
    def stream(self, request: Any) -> Any:
        Dies.num_streams += 1
        result = super().stream(request)
        if Dies.num_streams == 2:
            raise WorkerError("engine 0 died")
        return result


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_generator_that_dies_is_asked_again(
    run: Run, agents: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    monkeypatch.setattr(RunPlan, "overlaps", overlaps)
    Dies.num_streams = 0
    run(*ahead(1, *SMALL), registry=agents(generator=Dies))
    assert Dies.num_streams > 2
    require_each_prompt_once(tmp_path / "runs" / "run")

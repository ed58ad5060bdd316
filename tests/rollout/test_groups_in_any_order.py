"""Runs of groups whose samples, answers, deaths and kills come in any order: no group is lost, repeated, too old or waited for
in vain, whether turns or agents make it; and every sample is asked for and trained on with the images of its prompt."""

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.spi import (
    EpisodeResult,
    FinishReason,
    GenerateResult,
    Images,
    Observation,
    RaggedTokens,
    ResetResult,
    Row,
    SamplingParams,
    SessionEndpoint,
    StepResult,
    TokenBatch,
    Turn,
    WorkerError,
)
from rlcore.spi.execution import ResponseFeed, Responses
from rlcore.testing.fakes import FakeTokenizer
from rlcore_rollout.environment_runner import EpisodeRunner
from rlcore_rollout.episode_run import EpisodeRun
from rlcore_rollout.sampler import EpisodeSampler, StepSampler
from rlcore_rollout.saved_rollouts import dumps, loads, restore_rollouts, save_rollouts
from rlcore_rollout.schedule import Schedule, SchedulePolicy
from rlcore_rollout.step_plans import Draws, PromptLimit, StepPlan
from rlcore_serve.sessions.interface import session_server

TOKENIZER = FakeTokenizer()
GROUP_SIZE = 2
pytestmark = pytest.mark.timeout(300)

policies = st.builds(
    lambda on_stale, num_extra, **options: SchedulePolicy(
        on_stale=on_stale, num_extra=0 if on_stale == "wait" else num_extra, **options
    ),
    on_stale=st.sampled_from(["wait", "drop", "rescore"]),
    num_extra=st.integers(0, 2),
    groups_per_step=st.integers(1, 3),
    num_steps=st.integers(1, 4),
    max_staleness=st.integers(0, 2),
    max_refills=st.none() | st.just(10**6),
)

AHEAD = SchedulePolicy(groups_per_step=3, num_steps=4, max_staleness=1)


class Erratic:
    """A generator that samples end from in any order; it may die. `version` is that of its weights."""

    is_usable = True

    def __init__(self, random: Random) -> None:
        self._random = random
        self._deaths = 2

    def has(self, capability: str) -> bool:
        return False

    def stream(self, feed: ResponseFeed, version: int) -> None:
        running: dict[int, tuple[int, int]] = {}
        first = 0
        while (taken := feed.take(wait=not running)) is not None:
            for request in taken:
                assert_own_images(request.prompts, request.images)
                for sample, limit in enumerate(request.max_tokens.tolist()):
                    running[first + sample] = (min(int(request.seeds[sample]) % 6 + 1, limit), limit)
                first += len(request.seeds)
            if self._deaths and self._random.random() < 0.03:
                self._deaths -= 1
                raise WorkerError("engine 0 died")
            for number in self._random.sample(sorted(running), self._random.randint(0, min(2, len(running)))):
                length, limit = running.pop(number)
                reason = FinishReason.STOP if length < limit else FinishReason.LENGTH
                feed.deliver(np.array([number]), said(length, version, reason))
        for number, (length, _) in running.items():
            feed.deliver(np.array([number]), said(self._random.randint(0, length - 1), version, FinishReason.ABORTED))


def assert_own_images(sequences: RaggedTokens | TokenBatch, images: Images | None) -> None:
    """Each sequence has the images that its text names."""
    for number, bounds in enumerate(pairwise(sequences.offsets.tolist())):
        named = re.findall("shows ([a-z]+)", TOKENIZER.decode(sequences.tokens[slice(*bounds)]))
        assert [file.decode() for file in (() if images is None else images[number])] == named


def said(length: int, version: int, reason: FinishReason) -> Responses:
    result = GenerateResult(
        tokens=np.full(length, 3, np.int32),
        offsets=np.array([0, length]),
        logprobs=np.zeros(length, np.float32),
        weight_versions=np.full(length, version, np.int32),
        finish_reasons=np.array([reason], np.uint8),
    )
    return Responses.of(result, TOKENIZER)


class Tasks:
    """An environment, with turns and with agents. Calls take their time, and some fail. Most prompts have two images."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def _work(self) -> float:
        for _ in range(self._random.randint(0, 3)):
            await asyncio.sleep(0)
        if self._random.random() < 0.05:
            raise ConnectionError("no tool")
        return float(self._random.randint(0, 1))

    async def reset(self, row: Row, seed: int) -> ResetResult:
        await self._work()
        if row["number"] % 4 == 0:
            return ResetResult(observation=Observation(text="?"), state=0)
        files = ["".join(chr(ord("a") + int(digit)) for digit in f"{2 * row['number'] + one}") for one in range(2)]
        parts = [{"type": "image", "image": file.encode()} for file in files]
        parts += [{"type": "text", "text": f"shows {file}"} for file in files]
        return ResetResult(observation=Observation(messages=[{"role": "user", "content": parts}]), state=0)

    async def step(self, state: int, turn: Turn) -> StepResult:
        reward = await self._work()
        ends = state == 1 or reward == 1.0
        return StepResult(reward=reward, done=ends, observation=None if ends else Observation(text="!"), state=state + 1)

    async def run(self, row: Row, seed: int, session: SessionEndpoint) -> EpisodeResult:
        first = await ask(session, "?")
        if await self._work():
            await ask(session, "?", first, "!")
        return EpisodeResult(reward=await self._work())


async def ask(session: SessionEndpoint, *texts: str) -> str:
    """The answer to a chat, by the plainest client: a thread for each would cost more than all the rest."""
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    body = json.dumps({"model": session.model, "messages": messages}).encode()
    host, _, path = session.base_url.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    try:
        lines = f"POST /{path}/chat/completions HTTP/1.1", f"Host: {host}", "Connection: close", f"Content-Length: {len(body)}"
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        content: str = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]
        return content
    finally:
        writer.close()


def sampler_of(runner: EpisodeRunner, *, agents: bool) -> StepSampler[Any]:
    options: dict[str, Any] = {
        "generator": SimpleNamespace(has=lambda _: False),
        "episodes": runner,
        "tokenizer": TOKENIZER,
        "sampling": SamplingParams(stop_token_ids=(0,)),
        "samples_per_prompt": GROUP_SIZE,
        "max_response_tokens": 12,
        "max_failed_fraction": 1e9,
        "clock": PhaseClock(Progress()),
        "progress": Progress(),
    }
    if agents:
        module = pytest.importorskip("rlcore_serve.agents.collector", reason="sessions need a server")
        return module.AgentSampler(**options, server=session_server, max_sequence_length=200, history="refuse", trains=True)
    return EpisodeSampler(**options, prompt_limit=PromptLimit(max_tokens=300, drops=False, key="data.train"), max_turns=2)


class Life:
    """A run that may be killed, and goes on from what it last saved. `version` is that of the weights."""

    def __init__(self, policy: SchedulePolicy, sampler: StepSampler[Any], *, overlaps: bool) -> None:
        self.policy, self.sampler, self._overlaps = policy, sampler, overlaps
        self.trained: list[list[int]] = []
        self.given_up: set[int] = set()
        self._saved: bytes | None = None
        self._kept: tuple[list[list[int]], set[int]] = ([], set())
        self.run = self._begin()

    def _begin(self) -> EpisodeRun:
        found = None if self._saved is None else loads(self._saved)
        schedule = Schedule(self.policy, None if found is None else found.position)
        run = self.sampler.run_of(schedule, self._plan_of, overlaps=self._overlaps)
        if found is not None:
            restore_rollouts(run, found, found.distribution, lambda _: None)
        return run

    def _plan_of(self, step: int) -> StepPlan:
        number = self.policy.groups_per_step
        rows = [{"number": step * number + place} for place in range(number)]
        return StepPlan(rows=rows, draws=Draws((7, step), number, GROUP_SIZE))

    def step(self, generator: Any) -> list[Any]:
        """The groups of the next step, however often the generator dies."""
        while True:
            try:
                numbers = self.run.collect(generator, len(self.trained))
            except WorkerError:
                continue
            collector: Any = self.run.collectors
            return [collector.groups[number] for number in numbers]

    def train(self, groups: list[Any], *, stops_before: bool) -> None:
        if stops_before:
            self.run.pause()
        self.trained.append([group.number for group in groups])
        self.note_given_up()
        self.run.pause()
        self.run.train()
        self.note_given_up()

    def note_given_up(self) -> None:
        schedule = self.run.schedule
        self.given_up |= {*schedule.dropped, *schedule.refilled}

    def save(self) -> None:
        self.run.pause()
        self._saved = dumps(save_rollouts(self.run, {}, lambda _: None))
        self.note_given_up()
        self._kept = (list(self.trained), set(self.given_up))

    def kill(self) -> None:
        self.run.close()
        self.trained, self.given_up = list(self._kept[0]), set(self._kept[1])
        self.run = self._begin()


def versions_of(group: Any) -> Iterator[list[int]]:
    """Of the tokens in each part of each sample, in order."""
    for episode in group.episodes:
        parts = episode.versions if hasattr(episode, "versions") else [one.weight_versions for one in episode.segments]
        joined = [np.concatenate(parts)] if hasattr(episode, "versions") else parts
        yield from ([version for version in part.tolist() if version >= 0] for part in joined)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@example(policy=AHEAD, agents=False, overlaps=True, restarts=True, seed=3)
@given(policy=policies, agents=st.booleans(), overlaps=st.booleans(), restarts=st.booleans(), seed=st.integers(0, 2**32))
def test_whatever_comes_first_each_group_is_trained_on_once(
    policy: SchedulePolicy, agents: bool, overlaps: bool, restarts: bool, seed: int
) -> None:
    random = Random(seed)
    environment: Any = Tasks(Random(seed + 1))
    runner = EpisodeRunner(environment, 20.0, "mask")
    life = Life(policy, sampler_of(runner, agents=agents), overlaps=overlaps)
    generator, num_kills = Erratic(Random(seed + 2)), 0
    try:
        while len(life.trained) < policy.num_steps:
            groups = life.step(generator)
            assert len(groups) == policy.groups_per_step
            assert all(group.all_ended() for group in groups)
            batch = life.run.packed().batch
            assert_own_images(batch, batch.images)
            if policy.on_stale != "rescore":
                assert life.run.schedule.metrics()["async/staleness_max"] <= policy.max_staleness
            for versions in (versions for group in groups for versions in versions_of(group)):
                assert max(versions, default=0) <= len(life.trained)
                assert versions == sorted(versions) or agents  # a branch has what others said before
                assert len(set(versions)) < 2 or not restarts or agents
            if num_kills < 2 and random.random() < 0.2:
                num_kills += 1
                life.kill()
                continue
            life.train(groups, stops_before=random.random() < 0.5)
            if restarts:
                life.run.restart()
            if random.random() < 0.5:
                life.save()
        life.note_given_up()
        once = [number for numbers in life.trained for number in numbers]
        still_open = life.run.schedule.open_groups
        assert len(set(once)) == len(once)
        assert sorted([*once, *life.given_up, *still_open]) == list(range(life.run.schedule.next_number))
    finally:
        life.run.close()
        runner.close()

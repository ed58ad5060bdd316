"""What left the asynchronous loops of others waiting for ever, seven reports of NeMo-RL, each brought about in a run of ours.

The run goes on, or ends and says why; one that waited would be found by its test's time limit. The schedule alone is tested in
every order of events in rollout/test_schedule.py. These runs overlap in a thread, as with devices of their own.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import (
    ContractError,
    GenerateRequest,
    GenerateResult,
    Observation,
    ResetResult,
    Row,
    SampleFeed,
    StepResult,
    StreamRequest,
    StreamResult,
    Turn,
    WorkerError,
    hookimpl,
)
from rlcore.spi.arrays import Int64Array
from rlcore.testing.fakes.environment import FakeEnvironment
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore_rollout import group_collector
from rlcore_rollout.request_queue import SampleCount

from .test_asynchrony import Killed, Slow, Watched, ahead, prompts, rollouts  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.timeout(300)
QUIET = ("evaluation.at_start=false", "evaluation.at_end=false", "evaluation.every_n_steps=0", "data.train.shuffle=false")


@pytest.fixture(autouse=True)
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with devices of their own, in one process."""
    monkeypatch.setattr(RunPlan, "overlaps", True)


class Feed:
    """A feed that a generator's stream sees through a subclass's eyes."""

    def __init__(self, feed: SampleFeed, generator: FakeGenerator) -> None:
        self._requests, self._generator = feed, generator

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        return self._requests.take(wait=wait)

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        self._requests.deliver(samples, result)

    def end(self) -> None:
        self._requests.end()


class Streams(FakeGenerator):
    """Streams over such a feed."""

    feed: ClassVar[type[Feed]] = Feed

    @hookimpl
    def stream(self, request: StreamRequest) -> StreamResult:
        return super().stream(evolve(request, feed=self.feed(request.feed, self)))


def test_2899_the_end_of_the_data_begins_its_next_pass(run: Run, tmp_path: Path) -> None:
    """There the collector ended with the data, and the trainer waited for more."""
    run(*ahead(2, *QUIET, "environment.fake.num_train_rows=20"))
    found = prompts(tmp_path / "runs" / "run")
    assert (found.total(), len(found), set(found.values())) == (64, 20, {3, 4})


class Crashes(Feed):
    """Fails at the first requests behind a refit."""

    left: ClassVar[int] = 0

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        taken = self._requests.take(wait=wait)
        if taken and self._generator.weight_version > 0 and Crashes.left:
            Crashes.left -= 1
            raise WorkerError("engine 0 died")
        return taken


class Crashing(Streams):
    feed = Crashes


def test_3488_engines_that_crash_behind_a_refit_are_tried_again(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    Crashes.left = 1
    run(*ahead(1, *QUIET), registry=registry_with(generator=Crashing))
    assert Crashes.left == 0
    assert (set(prompts(tmp_path / "runs" / "run").values()), prompts(tmp_path / "runs" / "run").total()) == ({1}, 64)


def test_3488_engines_that_always_crash_behind_a_refit_end_the_run(run: Run, registry_with: Callable[..., Registry]) -> None:
    """There the threads that asked died, and the trainer looked at an empty buffer for hours."""
    Crashes.left = 10**6
    with pytest.raises(WorkerError, match="engine 0 died"):
        run(*ahead(1, *QUIET), registry=registry_with(generator=Crashing))


class Stuck(FakeEnvironment):
    """Never answers to the third prompt. Its samples' time passes only while none of another prompt is left to be answered, as
    none passes while their generator is stopped."""

    left: ClassVar[Counter[str]] = Counter()
    stopped_s = 0.0

    async def reset(self, row: Row, seed: int) -> ResetResult:
        prompt = str(row["prompt"])
        if seed and prompt[0] != "c":  # not where prompts are looked at before the run
            self.left[prompt] = 8
        return evolve(await super().reset(row, seed), state=prompt)

    async def step(self, state: str, turn: Turn) -> StepResult:
        if state[0] == "c":
            await asyncio.Event().wait()
        self.left[state] -= 1
        return await super().step(0, turn)

    @classmethod
    def stopped(cls) -> float:
        """What a count of samples says of its generator."""
        cls.stopped_s += 0.01 if any(number > 0 for number in cls.left.values()) else 0.0
        return cls.stopped_s


def test_3238_an_agent_that_never_ends_is_masked_and_holds_no_step_and_no_resume(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There one wedged the step, and wedged it again behind a resume."""
    monkeypatch.setattr(SampleCount, "stopped_s", lambda _: Stuck.stopped())
    Stuck.left.clear()
    options = ahead(1, *QUIET, "environment.fake.num_train_rows=64", "rollout.episode_timeout_s=0.3")
    registry = registry_with(environment=Stuck)
    with pytest.raises(Killed):
        run(*options, "checkpoint.every_n_steps=1", registry=registry, progress=Watched(1, kills=True))
    Stuck.left.clear()
    run(*options, "checkpoint.every_n_steps=1", registry=registry, resume=True)
    table = rollouts(tmp_path / "runs" / "run")
    masked = table[~table["valid"]]
    assert {prompt[0] for prompt in masked["prompt"]} == {"c"}
    assert len(masked) == 8
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}


class Long(FakeEnvironment):
    """Some prompts are over the limit, though not when they are looked at before the run."""

    seen: ClassVar[set[str]] = set()

    async def reset(self, row: Row, seed: int) -> ResetResult:
        result, prompt = await super().reset(row, seed), str(row["prompt"])
        if prompt[0] not in "defgh" or prompt not in self.seen:
            self.seen.add(prompt)
            return result
        return evolve(result, observation=Observation(text="x" * 17))


def test_3938_a_prompt_that_cannot_be_generated_leaves_no_hole(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    """There a place was reserved at a version, which nothing filled again; here another prompt takes it."""
    Long.seen.clear()
    options = (*ahead(2, *QUIET), "data.train.on_long_prompt=drop", "environment.fake.num_train_rows=64")
    run(*options, registry=registry_with(environment=Long))
    table = rollouts(tmp_path / "runs" / "run")
    assert (table.groupby("step")["group"].nunique() == 8).all()
    assert not {prompt[0] for prompt in table["prompt"]} & set("defgh")


class Refuses(Feed):
    """Takes all but one prompt, the sixtieth."""

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        taken = self._requests.take(wait=wait)
        for request in taken or ():
            rows = (request.prompts.sequence(index) for index in range(request.prompts.num_sequences))
            texts = [self._generator.tokenizer.decode(row) for row in rows]
            if any(text.startswith("bh") for text in texts):
                raise ContractError("a prompt that no engine takes")
        return taken


class Refusing(Streams):
    feed = Refuses


def test_3938_a_prompt_that_the_engine_refuses_ends_the_run(run: Run, registry_with: Callable[..., Registry]) -> None:
    with pytest.raises(ContractError, match="no engine takes"):
        run(*ahead(1, *QUIET), registry=registry_with(generator=Refusing))


class LateEvent(threading.Event):
    """Lets much happen before each wait, and before each look behind it."""

    def wait(self, timeout: float | None = None) -> bool:
        time.sleep(0.02)
        return super().wait(timeout)

    def clear(self) -> None:
        time.sleep(0.02)
        super().clear()


def test_3410_what_comes_between_a_look_and_a_wait_is_seen(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the wake-up was lost. Nothing looks again by itself here for longer than the test may take."""
    monkeypatch.setattr(group_collector, "threading", SimpleNamespace(Event=LateEvent, Thread=threading.Thread))
    monkeypatch.setattr(group_collector, "POLL_S", 100.0)
    run(*ahead(1, *QUIET))
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}


@pytest.mark.parametrize("killed_after", [1, 3])
def test_3599_a_resume_goes_on_with_what_was_under_way_and_what_was_replaced(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, killed_after: int
) -> None:
    """There 675 of 736 such prompts were forgotten."""
    options = ahead(2, *QUIET, "checkpoint.every_n_steps=1", "rollout.dynamic_sampling=true", "rollout.max_refill_ratio=20")
    registry = registry_with(environment=Slow)
    with pytest.raises(Killed):
        run(*options, registry=registry, progress=Watched(killed_after, kills=True))
    progress = Watched()
    Slow.steps_done = killed_after
    run(*options, registry=registry, progress=progress, resume=True)
    directory = tmp_path / "runs" / "run"
    table = rollouts(directory)
    assert (table.groupby("step")["group"].nunique() == 8).all()
    assert set(prompts(directory).values()) == {1}
    assert {prompt[0] for prompt in table["prompt"]} >= set("cdef"), "what was under way when it was killed"


class Straggler(Feed):
    """Keeps the first sample until the weights have changed."""

    def __init__(self, feed: SampleFeed, generator: FakeGenerator) -> None:
        super().__init__(feed, generator)
        self._kept: list[tuple[Int64Array, GenerateResult]] = []

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        if self._kept and self._generator.weight_version > 0:
            self._requests.deliver(*self._kept.pop())
        return self._requests.take(wait=False if self._kept else wait)

    def deliver(self, samples: Int64Array, result: GenerateResult) -> None:
        if self._generator.weight_version == 0 and 0 in samples:
            self._kept.append((samples, result))
        else:
            self._requests.deliver(samples, result)


class Straggling(Streams):
    feed = Straggler


def test_1098_no_refit_waits_for_the_samples_under_way(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    """There each waited for all of them; here one that waits for new weights gets them."""
    run(*ahead(1, *QUIET), registry=registry_with(generator=Straggling))
    table = rollouts(tmp_path / "runs" / "run")
    ages = [
        sample.step - 1 - np.asarray(sample.weight_versions)[np.asarray(sample.loss_mask)][0] for sample in table.itertuples()
    ]
    assert max(ages) == 1
    assert set(prompts(tmp_path / "runs" / "run").values()) == {1}

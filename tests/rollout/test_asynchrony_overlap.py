"""Runs whose generator goes on in a thread of its own while the trainer trains, with the fakes: what fails there, and when."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import evolve

from rlcore.registry.discovery import Registry
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.report.progress import Progress
from rlcore.spi import (
    GenerateRequest,
    InterruptedRun,
    ResetResult,
    RewardError,
    Row,
    SampleFeed,
    StepResult,
    StreamRequest,
    StreamResult,
    TrainStepRequest,
    TrainStepResult,
    Turn,
    WorkerError,
    hookimpl,
)
from rlcore.testing.fakes.environment import FakeEnvironment
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore.testing.fakes.trainer import FakeTrainer
from rlcore_rollout import environment_calls

from .test_asynchrony import ahead, prompts  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
LONG = (
    "rollout.max_response_tokens=60",
    "rollout.samples_per_prompt=2",
    "evaluation.at_start=false",
    "data.train.shuffle=false",
)
WAIT_S = 300.0
"""Most seconds for what another thread does at once."""


@pytest.fixture(autouse=True)
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with devices of their own, in one process."""
    monkeypatch.setattr(RunPlan, "overlaps", True)
    monkeypatch.setattr(environment_calls, "GRACE_S", 0.3)
    Step.begins.clear()
    Step.has_failed.clear()


class Notes(Progress):
    """Keeps the notes, and the last step."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.done = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done = step


class Step(FakeTrainer):
    """The third step goes on until something has failed beside it."""

    begins: ClassVar[threading.Event] = threading.Event()
    has_failed: ClassVar[threading.Event] = threading.Event()

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        if request.weight_version == 2:
            self.begins.set()
            assert self.has_failed.wait(WAIT_S)
        return super().train_step(request)


class Fails(FakeEnvironment):
    """Raises from the third step on. Two answers that only the fourth needs wait for that, or none might be left to come in
    the third. An episode that begins again after its failure fails again."""

    error: ClassVar[type[BaseException]] = LookupError

    async def reset(self, row: Row, seed: int) -> ResetResult:
        return evolve(await super().reset(row, seed), state=str(row["prompt"])[0] in "yz")

    async def step(self, state: bool, turn: Turn) -> StepResult:
        while state and not Step.begins.is_set():
            await asyncio.sleep(0.01)
        if Step.begins.is_set():
            Step.has_failed.set()
            raise self.error("no tool")
        return await super().step(0, turn)


class Interrupts(Fails):
    error = KeyboardInterrupt


class Dies(FakeGenerator):
    """Dies during the third step, once, with samples under way."""

    @hookimpl
    def stream(self, request: StreamRequest) -> StreamResult:
        return super().stream(evolve(request, feed=_DiesInStep(request.feed)))


class DiesAtItsEnd(FakeGenerator):
    """Dies once, behind its first stream."""

    @hookimpl
    def stream(self, request: StreamRequest) -> StreamResult:
        result = super().stream(request)
        if not Step.has_failed.is_set():
            Step.has_failed.set()
            raise WorkerError("engine 0 died")
        return result


class _DiesInStep:
    def __init__(self, feed: SampleFeed) -> None:
        self.deliver, self.end, self._requests = feed.deliver, feed.end, feed

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        while not (taken := self._requests.take(wait=False)) and taken is not None and wait:
            Step.begins.wait(0.01)
            self._die()
        self._die()
        return taken

    def _die(self) -> None:
        if Step.begins.is_set() and not Step.has_failed.is_set():
            Step.has_failed.set()
            raise WorkerError("engine 0 died")


@pytest.fixture(params=["continue", "restart"])
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return ahead(2, *LONG, f"async.partial_rollouts={request.param}")


def require_each_prompt_once(directory: Path) -> None:
    assert set(prompts(directory).values()) == {1}
    assert prompts(directory).total() == 64


def test_each_prompt_is_trained_on_once(run: Run, tmp_path: Path, options: tuple[str, ...]) -> None:
    run(*options)
    require_each_prompt_once(tmp_path / "runs" / "run")


def test_an_error_beside_a_step_leaves_the_step_and_its_checkpoint(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, options: tuple[str, ...]
) -> None:
    """It ends the run behind the step; what it interrupted is generated in the resumed run."""
    progress, unsaved = Notes(), (*options, "checkpoint.every_n_steps=0", "evaluation.every_n_steps=0")
    with pytest.raises(RewardError, match="no tool") as raised:
        run(*unsaved, registry=registry_with(environment=Fails, trainer=Step), progress=progress)
    assert progress.done >= 3  # a sample that begins again has another call, whose error may be the next step's
    assert f"after step {progress.done} is in" in str(raised.value.__notes__)
    run(*unsaved, resume=True)
    require_each_prompt_once(tmp_path / "runs" / "run")


class Counts(FakeEnvironment):
    """Counts how many of its calls are under way at once."""

    num_calls, most_calls = 0, 0

    async def step(self, state: Any, turn: Turn) -> StepResult:
        Counts.num_calls += 1
        Counts.most_calls = max(Counts.most_calls, Counts.num_calls)
        await asyncio.sleep(0.001)
        Counts.num_calls -= 1
        return await super().step(state, turn)


def test_an_evaluation_calls_no_environment_beside_what_trains(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    """It may be called so often at once."""
    Counts.most_calls = 0
    every = ("environment.fake.num_evaluation_rows=4", "evaluation.every_n_steps=1", "rollout.environment_concurrency=2")
    run(*ahead(2, *LONG, *every), registry=registry_with(environment=Counts))
    assert Counts.most_calls == 2
    require_each_prompt_once(tmp_path / "runs" / "run")


def test_an_environment_that_ends_the_run_as_ctrl_c_does_leaves_a_checkpoint(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, options: tuple[str, ...]
) -> None:
    with pytest.raises(InterruptedRun, match="--resume"):
        run(*options, registry=registry_with(environment=Interrupts, trainer=Step))
    run(*options, resume=True)
    require_each_prompt_once(tmp_path / "runs" / "run")


@pytest.mark.parametrize("saves", [0, 1])
def test_a_generator_that_dies_beside_a_step_is_tried_again_behind_it(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, options: tuple[str, ...], saves: int
) -> None:
    """As one that dies while the step waits for it."""
    progress = Notes()
    every = (f"checkpoint.every_n_steps={saves}", "evaluation.every_n_steps=0")
    run(*options, *every, registry=registry_with(generator=Dies, trainer=Step), progress=progress)
    assert [note for note in progress.notes if "generation failed and is tried again" in note]
    require_each_prompt_once(tmp_path / "runs" / "run")


class Waits(FakeEnvironment):
    """Its answers take for ever, until something has failed; those that still do when others are asked for."""

    num_waiting, num_left = 0, 0

    async def step(self, state: Any, turn: Turn) -> StepResult:
        if not Step.has_failed.is_set():
            Waits.num_waiting += 1
            Step.begins.set()
            try:
                await asyncio.Event().wait()
            finally:
                Waits.num_waiting -= 1
        Waits.num_left = max(Waits.num_left, Waits.num_waiting)
        return await super().step(state, turn)


def test_an_evaluation_whose_generator_dies_leaves_no_call_behind(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path
) -> None:
    """It is tried again, beside which they would be too many."""
    run(*ahead(1), registry=registry_with(environment=Waits, generator=Dies))
    assert (Waits.num_waiting, Waits.num_left) == (0, 0)
    require_each_prompt_once(tmp_path / "runs" / "run")


def test_an_evaluation_behind_a_death_gets_its_weights_anew(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The stream ends for the evaluation, with the weights that it needs."""
    run(*options, "evaluation.every_n_steps=1", registry=registry_with(generator=DiesAtItsEnd))
    require_each_prompt_once(tmp_path / "runs" / "run")

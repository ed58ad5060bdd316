"""The execution's part of the conformance kit: whole runs of the fakes, compared with those of the core's own execution."""

import json
import threading
from collections.abc import Callable, Mapping
from multiprocessing import active_children
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import CloseRequest, Provider, TrainStepRequest, TrainStepResult, WorkerError, hookimpl
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig
from rlcore_conformance.references.fixtures import ProviderFixtures

Figures: TypeAlias = list[Mapping[str, float]]
Run: TypeAlias = Callable[..., Figures]
_CLOCK = ("time/", "tokens_per_second", "generated_tokens_per_second")
_RECIPE = """
model.path = "none"
algorithm.name = "fake"
environment.name = "fake"
optimizer.learning_rate = 0.1
rollout = { max_prompt_tokens = 16, max_response_tokens = 8 }
training = { prompts_per_step = 4, minibatches_per_step = 2 }
checkpoint.every_n_steps = 1
data.evaluation = {}
evaluation.every_n_steps = 2
sinks.names = []
"""


@frozen(kw_only=True)
class WatchedConfig(FakeTrainerConfig):
    """The options of a trainer that fails on purpose, and says that it was closed."""

    folder: str
    """The folder of the notes."""
    fails: str = "never"
    """"once": a WorkerError in the second step, the first time. "always": a ValueError there, each time."""


class WatchedTrainer(FakeTrainer):
    """The fake trainer, as `WatchedConfig` says."""

    def __init__(self, context: Any, config: WatchedConfig) -> None:
        super().__init__(context, config)
        self._folder, self._fails = Path(config.folder), config.fails
        self._note("opened")

    @hookimpl
    def train_step(self, request: TrainStepRequest) -> TrainStepResult:
        """Fail where that is wanted, else train."""
        if request.weight_version >= 2 and self._fails == "always":
            raise ValueError("the trainer fails on purpose")
        if request.weight_version >= 2 and self._fails == "once" and not (self._folder / "failed").exists():
            self._note("failed")
            raise WorkerError("the worker is lost on purpose")
        return super().train_step(request)

    @hookimpl
    def close(self, request: CloseRequest) -> None:
        """Note that it was closed."""
        self._note("closed")
        super().close(request)

    def _note(self, word: str) -> None:
        with (self._folder / word).open("a") as file:
            file.write(".")


class ExecutionConformance(ProviderFixtures):
    """Checks of every execution::

        class TestMine(ExecutionConformance):
            @pytest.fixture
            def provider(self): return PROVIDER

    Fixtures to override where the default does not fit: `overrides`, KEY=VALUE of the recipe, such as keys of `[cluster]`; and
    `registry` where workers in other processes have to find the fakes as installed plugins.
    """

    @pytest.fixture
    def overrides(self) -> tuple[str, ...]:
        """The capabilities that the recipe needs of the execution."""
        return ()

    @pytest.fixture
    def registry(self, provider: Provider) -> Registry:
        """The execution and the fakes."""
        watched = evolve(FAKE_TRAINER, config=WatchedConfig, backend=f"{__name__}:WatchedTrainer")
        return Registry.from_providers(
            {
                "trainer": [watched],
                "generator": [FAKE_GENERATOR],
                "algorithm": [FAKE_ALGORITHM],
                "environment": [FAKE_ENVIRONMENT],
                "execution": [provider],
            }
        )

    @pytest.fixture
    def run(self, provider: Provider, registry: Registry, overrides: tuple[str, ...], tmp_path: Path) -> Run:
        """Runs the recipe by an execution: the one under test unless another is named. Returns the figures of each step."""

        def made(*more: str, execution: str = provider.name, steps: int = 3, resume: bool = False) -> Figures:
            recipe = tmp_path / "recipe.toml"
            recipe.write_text(_RECIPE)
            own = overrides if execution == provider.name else ()
            keys = (f"run.directory={tmp_path}", f"run.name={execution}", f"run.num_steps={steps}")
            words = [*keys, f"cluster.execution={execution}", f"trainer.fake.folder={tmp_path}", *own, *more]
            plan = prepare(recipe, words, registry=registry)
            train(plan, resume=resume, progress=Progress(), tokenizer=FakeTokenizer())
            lines = (tmp_path / execution / "metrics.jsonl").read_text().splitlines()
            return [{name: value for name, value in json.loads(line).items() if not name.startswith(_CLOCK)} for line in lines]

        return made

    def test_a_run_is_that_of_the_drivers_process(self, run: Run) -> None:
        """Each step has the figures that it has where everything is in one process, evaluations included."""
        found, expected = run(), run(execution="in_process")
        assert [one["step"] for one in found] == [one["step"] for one in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), f"step {ours['step']}"

    def test_a_resumed_run_is_one_that_went_on(self, run: Run) -> None:
        """States are saved and loaded wherever the trainer is."""
        run(steps=2)
        resumed, expected = run(steps=3, resume=True), run(execution="in_process")
        assert resumed[-1] == pytest.approx(expected[-1], rel=1e-4, abs=1e-6)

    def test_backends_come_again_after_a_lost_worker(self, run: Run, tmp_path: Path) -> None:
        """`opened()` is called a second time, and the run goes on from its checkpoint."""
        found = run("trainer.fake.fails=once", "cluster.max_restarts=1")
        assert (tmp_path / "failed").exists(), "the trainer was not asked for a second step"
        assert found[-1]["step"] == 3
        assert len((tmp_path / "opened").read_text()) == 2

    def test_an_error_ends_the_run(self, run: Run, tmp_path: Path) -> None:
        """An error of a backend passes through, and the backends are closed."""
        with pytest.raises(ValueError, match="fails on purpose"):
            run("trainer.fake.fails=always")
        assert self._closed(tmp_path)

    def test_backends_are_closed(self, run: Run, tmp_path: Path) -> None:
        """Each that was opened."""
        run()
        assert self._closed(tmp_path), "a trainer was opened and not closed"

    def test_nothing_is_left(self, run: Run) -> None:
        """Neither a thread nor a child process of Python's outlives the run."""
        run(execution="in_process")  # starts what the core keeps
        threads, children = set(threading.enumerate()), set(active_children())
        run()
        left = [one.name for one in {*threading.enumerate()} - threads if one.is_alive()]
        assert not left, f"threads are left: {', '.join(left)}"
        assert not {*active_children()} - children, "child processes are left"

    @staticmethod
    def _closed(folder: Path) -> bool:
        closed = folder / "closed"
        return closed.exists() and len(closed.read_text()) >= len((folder / "opened").read_text())

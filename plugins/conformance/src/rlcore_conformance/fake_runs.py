"""Whole runs of the fakes, which several parts of the kit make with one part replaced."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import Registry
from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore.spi import CloseRequest, EnvironmentContext, Provider, TrainStepRequest, TrainStepResult, WorkerError, hookimpl
from rlcore.testing.fakes import FakeTokenizer
from rlcore.testing.fakes.environment import FakeEnvironment, FakeEnvironmentConfig
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER
from rlcore.testing.fakes.trainer import FakeTrainer, FakeTrainerConfig

Figures: TypeAlias = list[Mapping[str, float]]
FakeRun: TypeAlias = Callable[..., Figures]
"""run(*overrides, name=…, steps=…, resume=…): the figures of each step of a run of the fakes."""
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


@frozen(kw_only=True)
class WatchedEnvironmentConfig(FakeEnvironmentConfig):
    """The options of an environment that says that it was closed."""

    folder: str
    """The folder of the note."""


class WatchedEnvironment(FakeEnvironment):
    """The fake environment, which notes that it was closed."""

    def __init__(self, context: EnvironmentContext, config: WatchedEnvironmentConfig) -> None:
        super().__init__(context, config)
        self._folder = Path(config.folder)

    def close(self) -> None:
        """Note it."""
        (self._folder / "environment-closed").touch()


def fakes(execution: Provider | None = None) -> Registry:
    """Return the fakes, of which trainer and environment are watched."""
    return Registry.from_providers(
        {
            "trainer": [evolve(FAKE_TRAINER, config=WatchedConfig, backend=f"{__name__}:WatchedTrainer")],
            "generator": [FAKE_GENERATOR],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [
                evolve(FAKE_ENVIRONMENT, config=WatchedEnvironmentConfig, backend=f"{__name__}:WatchedEnvironment")
            ],
            "execution": [] if execution is None else [execution],
        }
    )


def fake_run(registry: Registry, folder: Path) -> FakeRun:
    """Return what runs the recipe of the kit in a folder."""

    def run(*overrides: str, name: str = "run", steps: int = 3, resume: bool = False) -> Figures:
        recipe = folder / "recipe.toml"
        recipe.write_text(_RECIPE)
        keys = (f"run.directory={folder}", f"run.name={name}", f"run.num_steps={steps}")
        watched = (f"trainer.fake.folder={folder}", f"environment.fake.folder={folder}")
        plan = prepare(recipe, [*keys, *watched, *overrides], registry=registry)
        train(plan, resume=resume, progress=Progress(), tokenizer=FakeTokenizer())
        lines = (folder / name / "metrics.jsonl").read_text().splitlines()
        return [{key: value for key, value in json.loads(line).items() if not key.startswith(_CLOCK)} for line in lines]

    return run


class FakeRuns:
    """The fixtures of a part of the kit that makes runs of the fakes."""

    @pytest.fixture
    def overrides(self) -> tuple[str, ...]:
        """KEY=VALUE of the recipe."""
        return ()

    @pytest.fixture
    def run(self, overrides: tuple[str, ...], tmp_path: Path) -> FakeRun:
        """Runs the recipe in a folder of the test's."""
        made = fake_run(fakes(), tmp_path)
        return lambda *more, **options: made(*overrides, *more, **options)

"""What an observer of the loop is told, in which order, and what becomes of the figures that it returns."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rlcore.config.model import ModelConfig
from rlcore.config.plugin_choice import NamedPluginChoice, PluginChoice
from rlcore.config.recipe import CheckpointConfig, Recipe, RunConfig, TrainingConfig
from rlcore.run.protocols import LoopObserver, TrainedStep
from rlcore.run.report.progress import Progress
from rlcore.run.synchronous.run import SynchronousRun
from rlcore.testing.fakes import FakeTokenizer, fake_registry


class Recorder(LoopObserver):
    """Keeps the name and the step of each event."""

    def __init__(self, fails_at: str = "") -> None:
        self.told: list[str] = []
        self._fails_at = fails_at

    def _tell(self, event: str) -> None:
        self.told.append(event)
        if event == self._fails_at:
            raise ZeroDivisionError("the cause")

    def on_start(self, step: int) -> None:
        self._tell(f"begins {step}")

    def on_measure(self, step: int, weight_version: int) -> Mapping[str, float]:
        self._tell(f"measure {step} at {weight_version}")
        return {"measured": float(step)}

    def on_step_trained(self, step: TrainedStep) -> Mapping[str, float]:
        assert step.sampled.batch.num_tokens == step.trained.num_tokens
        self._tell(f"trained {step.step}")
        return {"seen": float(step.step)}

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert metrics["measured"] == step
        self._tell(f"log {step}")

    def on_checkpoint_saved(self, step: int, export: Callable[[Path], Path]) -> None:
        self._tell(f"saved {step}")

    def on_idle(self) -> None:
        self._tell("between")

    def on_last_step(self) -> None:
        self._tell("ends")


EVENTS = [
    *("begins 0", "measure 0 at 0", "log 0", "between"),
    *("trained 1", "measure 1 at 1", "log 1", "between"),
    *("trained 2", "measure 2 at 2", "log 2", "saved 2", "between"),
    "ends",
]


def run_with(recorder: Recorder, directory: Path) -> None:
    fake = PluginChoice(name="fake")
    recipe = Recipe(
        model=ModelConfig(path="none"),
        trainer=fake,
        generator=fake,
        algorithm=NamedPluginChoice(name="fake"),
        environment=NamedPluginChoice(name="fake"),
        run=RunConfig(num_steps=2),
        training=TrainingConfig(prompts_per_step=4),
        checkpoint=CheckpointConfig(every_n_steps=2, at_end=False),
    )
    run = SynchronousRun(
        recipe=recipe, registry=fake_registry(), tokenizer=FakeTokenizer(), rows=[{"prompt": "abc:"}], observers=[recorder]
    )
    run.train(directory / "metrics.jsonl", Progress())


def test_events_come_in_order_and_their_figures_are_the_steps(tmp_path: Path) -> None:
    recorder = Recorder()
    run_with(recorder, tmp_path)
    assert recorder.told == EVENTS
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["measured"], line.get("seen")) for line in lines] == [(0, 0, None), (1, 1, 1), (2, 2, 2)]


@pytest.mark.parametrize("event", [*dict.fromkeys(EVENTS)])
def test_what_an_observer_raises_ends_the_run(tmp_path: Path, event: str) -> None:
    recorder = Recorder(fails_at=event)
    with pytest.raises(ZeroDivisionError, match="the cause"):
        run_with(recorder, tmp_path)
    assert recorder.told == EVENTS[: EVENTS.index(event) + 1]

"""Observers that are built with a context and receive the figures of steps."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcore.plugins.discovery import Registry
from rlcore.spi import ObserverContext, PluginError, hookimpl
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER

from .conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


def registry(observer: object) -> Registry:
    providers = {
        "trainer": [FAKE_TRAINER],
        "generator": [FAKE_GENERATOR],
        "algorithm": [FAKE_ALGORITHM],
        "environment": [FAKE_ENVIRONMENT],
    }
    return Registry.from_providers(providers, observers=[observer])  # type: ignore[arg-type]


class Diary:
    """Writes the step's figures into the run directory, with the updates that its own hook has seen since the last."""

    def __init__(self, context: ObserverContext) -> None:
        assert context.run_directory is not None
        self.file, self.rank, self.num_updates = context.run_directory / "diary.jsonl", context.rank, 0

    @hookimpl(wrapper=True)
    def train_step(self, request):
        self.num_updates += 1
        return (yield)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, "seen": self.num_updates, "rank": self.rank, **metrics}) + "\n")
        self.num_updates = 0


def test_an_observer_gets_the_run_directory_and_each_steps_figures(run: Run, tmp_path: Path) -> None:
    run("run.num_steps=3", registry=registry(Diary))
    directory = tmp_path / "runs" / "run"
    diary = [json.loads(line) for line in (directory / "diary.jsonl").read_text().splitlines()]
    assert [(line.pop("step"), line.pop("seen"), line.pop("rank")) for line in diary] == [
        (0, 0, 0),
        (1, 2, 0),
        (2, 2, 0),
        (3, 2, 0),
    ]
    records = read_metrics(directory, timed=True)
    assert diary == [{name: value for name, value in record.items() if name != "step"} for record in records]


class Counter:
    """Has no hooks."""

    def __init__(self, context: ObserverContext) -> None:
        self.context = context

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics.get("updates") and step == 2:
            metrics["loss"] = 0.0  # type: ignore[index]
            raise ValueError("enough")


def test_what_an_observer_raises_ends_the_run_and_names_it_and_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enough") as caught:
        run(registry=registry(Counter))
    assert any("raised in after_step of observer 'observer-0'" in note for note in caught.value.__notes__)
    assert any("The state after step 2 is in" in note for note in caught.value.__notes__)
    run(resume=True)
    run("run.name=whole")
    assert read_metrics(tmp_path / "runs" / "run") == read_metrics(tmp_path / "runs" / "whole")


class TakesNothing:
    def after_step(self, step, metrics):
        """Nothing."""


class WrongSignature:
    def __init__(self, context):
        """Nothing."""

    def after_step(self, step):
        """Nothing."""


class WithoutAnything:
    def __init__(self, context):
        """Nothing."""


class Refuses:
    def __init__(self, context):
        raise OSError("no connection to the tracker")


@pytest.mark.parametrize(
    ("observer", "error", "said"),
    [
        (
            TakesNothing,
            PluginError,
            "names the class TakesNothing, which is built with a context: too many positional arguments",
        ),
        (WrongSignature, PluginError, r"after_step: found after_step\(step\); expected after_step\(step, metrics\)"),
        (WithoutAnything, PluginError, r"no hooks; expected methods .*or after_step\(step, metrics\)"),
        (Refuses, OSError, "no connection to the tracker"),
    ],
)
def test_one_that_does_not_fit_is_said_before_a_step(run: Run, tmp_path: Path, observer: type, error: type, said: str) -> None:
    with pytest.raises(error, match=said):
        run(registry=registry(observer))
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()

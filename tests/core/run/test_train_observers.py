"""Observers that are built with a context and receive the figures of steps."""

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import ObserverEntry, Registry
from rlcore.registry.observers import build_observers
from rlcore.registry.plugin_errors import owner_of
from rlcore.spi import ConfigError, ObserverContext, PluginError, hookimpl
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
    assert owner_of(caught.value) == "observer 'observer-0' (in-process 0)"
    assert any("The state after step 2 is in" in note for note in caught.value.__notes__)
    run(resume=True)
    run("run.name=whole")
    assert read_metrics(tmp_path / "runs" / "run") == read_metrics(tmp_path / "runs" / "whole")


@frozen(kw_only=True)
class TailConfig:
    """Options of the next one."""

    figure: str
    """What it writes."""
    last: int = 2
    """So many of them."""


class Tail:
    """Keeps the last values of one figure."""

    config = TailConfig

    def __init__(self, context: ObserverContext) -> None:
        assert context.run_directory is not None
        self.options, self.file, self.values = context.options, context.run_directory / "tail.json", []

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.values = [*self.values, metrics.get(self.options.figure)][-self.options.last :]
        self.file.write_text(json.dumps(self.values))


def test_an_observer_gets_its_section_of_the_recipe(run: Run, tmp_path: Path) -> None:
    run("run.num_steps=3", "observers.observer-0.figure=reward_mean", registry=registry(Tail))
    directory = tmp_path / "runs" / "run"
    rewards = [record.get("reward_mean") for record in read_metrics(directory)]
    assert json.loads((directory / "tail.json").read_text()) == rewards[-2:] != [None, None]
    written = tomllib.loads((directory / "recipe.toml").read_text())
    assert written["observers"] == {"names": [], "observer-0": {"figure": "reward_mean", "last": 2}}


def test_a_wrong_section_of_an_observer_is_found_before_the_run(prepared: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"observers\.observer-0\.figure: found nothing"):
        prepared(registry=registry(Tail))
    with pytest.raises(ConfigError) as caught:
        prepared("observers.observer-0.lats=2", "observers.observer-0.figure=3", "run.seed=x", registry=registry(Tail))
    assert {problem.path for problem in caught.value.problems} == {
        "observers.observer-0.lats",
        "observers.observer-0.figure",
        "run.seed",
    }
    with pytest.raises(ConfigError, match=r"observers\.observer-0\.last: found an unknown key"):
        prepared("observers.observer-0.last=2", registry=registry(Counter))


def test_sections_of_disabled_and_broken_observers_are_left_alone(prepared: Callable[..., Any]) -> None:
    entries = (
        ObserverEntry(name="off", distribution="acme", version="1", observer=None, disabled=True),
        ObserverEntry(name="broken", distribution="acme", version="1", observer=None, error="import failed"),
    )
    installed = evolve(registry(Counter), observer_entries=entries)
    assert prepared("observers.off.a=1", "observers.broken.b=2", registry=installed).observers == ()


def test_a_process_whose_observer_is_another_one_says_so() -> None:
    observers = registry(Tail).observers(())
    context = ObserverContext(run_directory=None, rank=1)
    for options, found in (({}, "found no options for it"), ({"observer-0": 3}, "found another class's options for it")):
        with pytest.raises(PluginError, match=f"^observer 'observer-0' .*: {found}; expected the packages"):
            build_observers(observers, context, options)


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
    with pytest.raises(error, match=said) as caught:
        run(registry=registry(observer))
    assert error is PluginError or owner_of(caught.value) == "observer 'observer-0' (in-process 0)"
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()

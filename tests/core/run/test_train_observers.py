"""Observers that are built with a context."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from rlcore.registry.binding import build_observers
from rlcore.registry.discovery import Registry
from rlcore.registry.plugin_errors import owner_of
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
    """Writes into the run directory what its hook sees."""

    def __init__(self, context: ObserverContext) -> None:
        assert context.run_directory is not None
        self.file = context.run_directory / f"diary-{context.rank}.txt"

    @hookimpl(wrapper=True)
    def train_step(self, request):
        with self.file.open("a") as file:
            file.write(f"{request.weight_version}\n")
        return (yield)


def test_an_observer_gets_the_run_directory_and_its_rank(run: Run, tmp_path: Path) -> None:
    run("run.num_steps=3", registry=registry(Diary))
    assert (tmp_path / "runs" / "run" / "diary-0.txt").read_text().split() == list(map(str, range(6)))


class Counter:
    """Raises in the fifth update."""

    def __init__(self, context: ObserverContext) -> None:
        self.context = context

    @hookimpl(wrapper=True)
    def train_step(self, request):
        if request.weight_version == 4:
            raise ValueError("enough")
        return (yield)


def test_what_an_observer_raises_ends_the_run_and_names_it_and_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enough") as caught:
        run(registry=registry(Counter))
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
    """Keeps the last values of one figure of the updates."""

    config = TailConfig

    def __init__(self, context: ObserverContext) -> None:
        assert context.run_directory is not None
        self.options, self.file, self.values = context.options, context.run_directory / "tail.json", []

    @hookimpl(wrapper=True)
    def train_step(self, request):
        result = yield
        self.values = [*self.values, getattr(result, self.options.figure)][-self.options.last :]
        self.file.write_text(json.dumps(self.values))
        return result


def test_an_observer_gets_its_section_of_the_recipe(run: Run, tmp_path: Path) -> None:
    run("run.num_steps=3", "observers.observer-0.figure=weight_version", registry=registry(Tail))
    directory = tmp_path / "runs" / "run"
    assert json.loads((directory / "tail.json").read_text()) == [5, 6]
    written = tomllib.loads((directory / "recipe.toml").read_text())
    assert written["observers"] == {"names": [], "observer-0": {"figure": "weight_version", "last": 2}}


def test_a_process_whose_observer_is_another_one_says_so() -> None:
    observers = registry(Tail).observers(())
    context = ObserverContext(run_directory=None, rank=1)
    for options, found in (({}, "found no options for it"), ({"observer-0": 3}, "found another class's options for it")):
        with pytest.raises(PluginError, match=f"^observer 'observer-0' .*: {found}; expected the packages"):
            build_observers(observers, context, options)


class TakesNothing:
    """Cannot be built with a context."""


class WrongSignature:
    def __init__(self, context):
        """Nothing."""

    @hookimpl(wrapper=True)
    def train_step(self):
        return (yield)


class WithoutAnything:
    def __init__(self, context):
        """Nothing."""


class Refuses:
    def __init__(self, context):
        raise OSError("no place to write")


@pytest.mark.parametrize(
    ("observer", "error", "said"),
    [
        (TakesNothing, PluginError, r"names the class TakesNothing, which takes \(\); expected \(context\)"),
        (WrongSignature, PluginError, r"train_step: found train_step\(\); expected train_step\(request\)"),
        (WithoutAnything, PluginError, "no hooks; expected methods"),
        (Refuses, OSError, "no place to write"),
    ],
)
def test_one_that_does_not_fit_is_said_before_a_step(run: Run, tmp_path: Path, observer: type, error: type, said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        run(registry=registry(observer))
    assert error is PluginError or owner_of(caught.value) == "observer 'observer-0' (in-process 0)"
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()

"""The recipe's sections of plugins: of broken ones nobody asks for, and of observers."""

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve, frozen

from rlcore.registry.discovery import ObserverEntry, Registry, discover
from rlcore.registry.selection import select
from rlcore.run.plan.sections import sections
from rlcore.spi import SPI_VERSION, ConfigError, ObserverContext, hookimpl
from rlcore.testing.fakes import fake_registry


class Counter:
    """An observer without options."""

    def __init__(self, context: ObserverContext) -> None:
        self.context = context

    @hookimpl(wrapper=True)
    def train_step(self, request):
        return (yield)


@frozen(kw_only=True)
class TailConfig:
    """Options of the next one."""

    figure: str
    """What it writes."""
    last: int = 2
    """So many of them."""


class Tail(Counter):
    """One with options, of which one is required."""

    config = TailConfig


def registry(observer: object) -> Registry:
    """The fakes, with an observer that every run has."""
    return evolve(fake_registry(), observer_entries=Registry.from_providers({}, observers=[observer]).observer_entries)


def test_the_sections_of_a_recipe_are_those_of_sound_plugins(installer):
    installer.trainer("good")
    installer.trainer("shapeless", backend="no path")
    installer.trainer("future", spi=(SPI_VERSION[0] + 1, 0))
    installer.add("acme-broken", {"rlcore.trainers": {"broken": "broken_section:PROVIDER"}}, broken_section="1 / 0\n")
    registry = discover()
    assert list(sections(registry)["trainer"]) == ["good"]
    assert select(registry, "trainer", "good", device="cpu", needs={}).name == "good"


def test_a_wrong_section_of_an_observer_is_found_before_the_run(prepared: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared(registry=registry(Tail))
    assert [(problem.path, problem.found) for problem in raised.value.problems] == [("observers.observer-0.figure", "nothing")]
    with pytest.raises(ConfigError) as raised:
        prepared("observers.observer-0.lats=2", "observers.observer-0.figure=3", "run.seed=x", registry=registry(Tail))
    assert {problem.path for problem in raised.value.problems} == {
        "observers.observer-0.lats",
        "observers.observer-0.figure",
        "run.seed",
    }
    with pytest.raises(ConfigError) as raised:
        prepared("observers.observer-0.last=2", registry=registry(Counter))
    (problem,) = raised.value.problems
    assert (problem.path, problem.found) == ("observers.observer-0.last", "an unknown key")


def test_sections_of_disabled_and_broken_observers_are_left_alone(prepared: Callable[..., Any]) -> None:
    entries = (
        ObserverEntry(name="off", distribution="acme", version="1", observer=None, disabled=True),
        ObserverEntry(name="broken", distribution="acme", version="1", observer=None, error="import failed"),
    )
    installed = evolve(registry(Counter), observer_entries=entries)
    assert prepared("observers.off.a=1", "observers.broken.b=2", registry=installed).observers == ()

"""Closing at the end: the first error is the one that is raised, and observers that are unfit stop a run before it begins."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from rlcore.registry.discovery import ObserverEntry, Registry
from rlcore.spi import NonFiniteError, PluginError, hookimpl
from rlcore.testing.fakes import fake_registry
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore.testing.fakes.trainer import FakeTrainer

Run = Callable[..., dict[str, Any]]


class Trainer(FakeTrainer):
    @hookimpl
    def train_step(self, request):
        raise NonFiniteError("the loss is nan")

    @hookimpl
    def close(self, request):
        raise RuntimeError("CUDA error")


class Generator(FakeGenerator):
    @hookimpl
    def close(self, request):
        raise OSError("no such engine")


def registry_with(**backends: type) -> Registry:
    registry = fake_registry()
    entries = [
        evolve(entry, provider=evolve(entry.provider, backend=f"{__name__}:{backends[entry.role].__name__}"))
        if entry.role in backends
        else entry
        for entry in registry.entries
    ]
    return evolve(registry, entries=tuple(entries))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The providers name their classes by import path."""
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Trainer.__module__])


def test_a_failing_close_is_a_note_on_what_failed_before(run: Run) -> None:
    with pytest.raises(NonFiniteError, match="the loss is nan") as raised:
        run(registry=registry_with(trainer=Trainer, generator=Generator))
    notes = "\n".join(raised.value.__notes__)
    assert "generator 'fake' (in-process 0) then failed in close too: OSError: no such engine" in notes
    assert "trainer 'fake' (in-process 0) then failed in close too: RuntimeError: CUDA error" in notes


def test_a_failing_close_is_the_error_where_nothing_else_failed(run: Run) -> None:
    with pytest.raises(OSError, match="no such engine"):
        run(registry=registry_with(generator=Generator))


def test_an_unfit_observer_is_found_before_anything_is_allocated(prepared: Callable[..., Any]) -> None:
    broken = ObserverEntry(name="watch", distribution="acme", version="1.0", observer=None, error="import failed")
    registry = evolve(fake_registry(), observer_entries=(broken,))
    assert prepared(registry=registry).observers == ()
    with pytest.raises(PluginError, match=r"'watch' \(acme 1.0\) .*: import failed"):
        prepared('observers.names=["watch"]', registry=registry)


def test_a_backend_that_is_not_there_is_found_before_anything_is_allocated(prepared: Callable[..., Any]) -> None:
    registry = fake_registry()
    (entry,) = registry.of("trainer")
    absent = evolve(entry, provider=evolve(entry.provider, backend="no_such_backend:Trainer"))
    entries = tuple(absent if other is entry else other for other in registry.entries)
    with pytest.raises(PluginError, match="'no_such_backend:Trainer'.* no module 'no_such_backend'"):
        prepared(registry=evolve(registry, entries=entries))

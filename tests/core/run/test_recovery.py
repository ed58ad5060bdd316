"""Workers that die and refits that fail: tried again with the same seeds, a bounded number of times, and never stale."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import evolve

from rlcore.plugins.discovery import Registry
from rlcore.run.progress import SilentProgress
from rlcore.spi import RefitError, WorkerError, hookimpl
from rlcore.testing.fakes.generator import FakeGenerator
from rlcore.testing.fakes.providers import FAKE_ALGORITHM, FAKE_ENVIRONMENT, FAKE_GENERATOR, FAKE_TRAINER

from .conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


class Mortal(FakeGenerator):
    """Dies in calls number `dies_in`, counted per hook from 1, and comes back without weights."""

    dies_in: ClassVar[dict[str, set[int]]] = {}
    calls: ClassVar[dict[str, int]] = {}

    @classmethod
    def dies(cls, **hooks: set[int]) -> None:
        cls.dies_in, cls.calls = hooks, dict.fromkeys(hooks, 0)

    def survive(self, hook: str) -> None:
        if hook not in self.calls:
            return
        self.calls[hook] += 1
        if self.calls[hook] in self.dies_in[hook]:
            self.weights, self.weight_version = {}, -1
            raise WorkerError(f"engine 0 died in {hook}\nits last lines")

    @hookimpl
    def generate(self, request):
        result = super().generate(request)
        self.survive("generate")
        return result

    @hookimpl
    def refit(self, request):
        self.survive("refit")
        return super().refit(request)


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def mortal() -> Registry:
    provider = evolve(FAKE_GENERATOR, backend=f"{__name__}:Mortal")
    return Registry.from_providers(
        {
            "trainer": [FAKE_TRAINER],
            "generator": [provider],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
        }
    )


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider names its class by import path."""
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules[Mortal.__module__])


def test_what_a_dead_worker_took_with_it_is_generated_again(run: Run, mortal: Registry, tmp_path: Path) -> None:
    """With the metrics of an undisturbed run."""
    Mortal.dies()
    run("run.name=undisturbed", registry=mortal)
    Mortal.dies(generate={2, 4, 7}, refit={3})
    notes = Notes()
    run("run.name=disturbed", registry=mortal, progress=notes)
    undisturbed, disturbed = (read_metrics(tmp_path / "runs" / name) for name in ("undisturbed", "disturbed"))
    assert disturbed == undisturbed
    assert len(notes.texts) == 4
    assert sum("generation failed and is tried again: engine 0 died in generate" in text for text in notes.texts) == 3
    assert sum("refit to version" in text and "its last lines" not in text for text in notes.texts) == 1


@pytest.mark.parametrize("hook", ["generate", "refit"])
def test_a_worker_that_keeps_dying_ends_the_run(run: Run, mortal: Registry, tmp_path: Path, hook: str) -> None:
    """After refit.max_attempts, with what was done before intact."""
    Mortal.dies(**{hook: set(range(4, 100))})
    with pytest.raises(WorkerError, match=f"died in {hook}"):
        run("refit.max_attempts=3", registry=mortal)
    assert Mortal.calls[hook] == 4 + 2
    Mortal.dies()
    summary = run("refit.max_attempts=3", registry=mortal, resume=True)
    assert summary["steps"] == 6


def test_one_attempt_is_one(run: Run, mortal: Registry) -> None:
    Mortal.dies(refit={1})
    with pytest.raises(WorkerError):
        run("refit.max_attempts=1", registry=mortal)
    assert Mortal.calls["refit"] == 1


def test_weights_that_change_on_the_way_twice_end_the_run(run: Run, mortal: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self, request):
        raise RefitError("refit: layer.0 changed on the way")

    monkeypatch.setattr(Mortal, "survive", lambda self, hook: refuse(self, None) if hook == "refit" else None)
    with pytest.raises(RefitError, match="changed on the way"):
        run(registry=mortal)

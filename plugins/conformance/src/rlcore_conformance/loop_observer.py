"""The loop observer's part of the conformance kit: whole runs of the fakes, with it and without it."""

import threading
from multiprocessing import active_children
from typing import Any

import pytest

from rlcore.registry.run_parts import LoopObserverEntry
from rlcore.spi import LoopObserverProvider
from rlcore_conformance.fake_runs import FakeRun, FakeRuns


class LoopObserverConformance(FakeRuns):
    """Checks of every observer of the loop::

        class TestMine(LoopObserverConformance):
            @pytest.fixture
            def provider(self): return DISK

    Fixtures to override where the default does not fit: `overrides`, KEY=VALUE of the recipe, such as the key that asks for it.
    """

    @pytest.fixture
    def provider(self) -> LoopObserverProvider:
        """The observer under test: override it."""
        pytest.fail("override the fixture `provider` to return the LoopObserverProvider under test", pytrace=False)

    @pytest.fixture
    def entry(self, provider: LoopObserverProvider) -> LoopObserverEntry:
        """The observer as an installed one."""
        return LoopObserverEntry(name=provider.name, distribution="kit", version="1").holding(provider)

    @pytest.fixture
    def observed(self, run: FakeRun, entry: LoopObserverEntry, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
        """Runs the recipe with the observer alone."""

        def made(*more: str, **options: Any) -> Any:
            with monkeypatch.context() as patched:
                for place in ("rlcore.run.observers", "rlcore.run.plan.checks"):
                    patched.setattr(f"{place}.wanted_observers", lambda recipe: (entry,))  # noqa: ARG005
                return run(*more, **options)

        return made

    def test_the_description(self, entry: LoopObserverEntry) -> None:
        """It has no faults, and its functions are there."""
        assert entry.error is None
        assert entry.unavailable() is None

    def test_a_run_is_the_one_without_it(self, run: FakeRun, observed: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
        """It adds figures, numbers all, and changes none."""
        found = observed(name="observed")
        monkeypatch.setattr("rlcore.run.observers.wanted_observers", lambda _: ())  # it may be installed
        expected = run(name="alone")
        assert [one["step"] for one in found] == [one["step"] for one in expected]
        for ours, theirs in zip(found, expected, strict=True):
            changed = [name for name, value in theirs.items() if ours.get(name) != pytest.approx(value, nan_ok=True)]
            assert not changed, f"step {ours['step']} has other figures: {', '.join(changed)}"
            odd = {name: value for name, value in ours.items() if type(value) not in (int, float)}
            assert not odd, f"step {ours['step']} has figures that are no numbers: {odd}"

    def test_a_run_is_resumed(self, observed: FakeRun) -> None:
        """A run that goes on builds it anew, and repeats the event of the last checkpoint."""
        observed(steps=2)
        assert observed(steps=3, resume=True)[-1]["step"] == 3

    def test_an_error_of_the_run_stays(self, observed: FakeRun) -> None:
        """Where the run fails, it is closed, and hides no error."""
        with pytest.raises(ValueError, match="fails on purpose"):
            observed("trainer.fake.fails=always")

    def test_threads_and_processes_end(self, observed: FakeRun) -> None:
        """Threads and processes of the observer end with the run."""
        observed(name="first")  # starts what the core keeps
        threads, children = {*threading.enumerate()}, {*active_children()}
        observed(name="second")
        left = [one.name for one in {*threading.enumerate()} - threads if one.is_alive()]
        assert not left, f"threads are left: {', '.join(left)}"
        assert not {*active_children()} - children, "child processes are left"

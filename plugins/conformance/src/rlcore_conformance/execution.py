"""The execution's part of the conformance kit: whole runs of the fakes, compared with those of the core's own execution."""

import threading
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.spi import Provider
from rlcore_conformance.fake_runs import FakeRun, Figures, fake_run, fakes
from rlcore_conformance.references.fixtures import ProviderFixtures


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
        return fakes(provider)

    @pytest.fixture
    def run(self, provider: Provider, registry: Registry, overrides: tuple[str, ...], tmp_path: Path) -> FakeRun:
        """Runs the recipe by an execution: the one under test unless another is named. Returns the figures of each step."""
        run = fake_run(registry, tmp_path)

        def made(*more: str, execution: str = provider.name, **options: Any) -> Figures:
            own = overrides if execution == provider.name else ()
            return run(f"cluster.execution={execution}", *own, *more, name=execution, **options)

        return made

    def test_a_run_is_that_of_the_drivers_process(self, run: FakeRun) -> None:
        """Each step has the figures that it has where everything is in one process, evaluations included."""
        found, expected = run(), run(execution="in_process")
        assert [one["step"] for one in found] == [one["step"] for one in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), f"step {ours['step']}"

    def test_a_resumed_run_is_one_that_went_on(self, run: FakeRun) -> None:
        """States are saved and loaded wherever the trainer is."""
        run(steps=2)
        resumed, expected = run(steps=3, resume=True), run(execution="in_process")
        assert resumed[-1] == pytest.approx(expected[-1], rel=1e-4, abs=1e-6)

    def test_backends_come_again_after_a_lost_worker(self, run: FakeRun, tmp_path: Path) -> None:
        """`opened()` is called a second time, and the run goes on from its checkpoint."""
        found = run("trainer.fake.fails=once", "cluster.max_restarts=1")
        assert (tmp_path / "failed").exists(), "the trainer was not asked for a second step"
        assert found[-1]["step"] == 3
        assert len((tmp_path / "opened").read_text()) == 2

    def test_an_error_ends_the_run(self, run: FakeRun, tmp_path: Path) -> None:
        """An error of a backend passes through, and the backends are closed."""
        with pytest.raises(ValueError, match="fails on purpose"):
            run("trainer.fake.fails=always")
        assert self._closed(tmp_path)

    def test_backends_are_closed(self, run: FakeRun, tmp_path: Path) -> None:
        """Each that was opened."""
        run()
        assert self._closed(tmp_path), "a trainer was opened and not closed"

    def test_nothing_is_left(self, run: FakeRun) -> None:
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

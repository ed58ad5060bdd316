"""In which order a run calls its display, and that it does without any answer."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.report.progress import Progress
from rlcore.spi import Row
from rlcore.testing.fakes.environment import FakeEnvironment

EVENTS = [name for name in vars(Progress) if not name.startswith("_") and callable(getattr(Progress, name))]


class Recorder(Progress):
    """Keeps the name of every event and the thread of those that are not samples."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.threads: set[int] = set()

    def __getattribute__(self, name: str) -> Any:
        if name in EVENTS:
            self.events.append(name)
            if name != "samples":
                self.threads.add(threading.get_ident())
        return super().__getattribute__(name)


OPTIONS = ("run.num_steps=2", "evaluation.at_start=true")


def test_a_run_is_started_first_and_finished_last_in_the_drivers_thread(
    run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    progress = Recorder()
    assert progress.run_directory is None
    run(*OPTIONS, progress=progress)
    assert progress.run_directory == tmp_path / "runs" / "run"
    steps = [event for event in progress.events if event in ("started", "step", "finished")]
    assert steps == ["started", "step", "step", "step", "finished"]
    assert progress.events[-1] == "finished"
    assert {"phase", "samples"} <= set(progress.events[progress.events.index("started") :])
    assert progress.threads == {threading.get_ident()}


def test_a_run_that_fails_is_not_finished(run: Callable[..., dict[str, Any]], registry_with: Callable[..., Registry]) -> None:
    class Broken(FakeEnvironment):
        async def step(self, state: Any, turn: Any) -> Any:
            raise KeyError("no judge")

        def rows(self, split: str) -> list[Row]:
            return [{"prompt": "a:"}]

    progress = Recorder()
    with pytest.raises(Exception, match="no judge"):
        run(*OPTIONS, progress=progress, registry=registry_with(environment=Broken))
    assert progress.events.count("started") == 1
    assert "finished" not in progress.events

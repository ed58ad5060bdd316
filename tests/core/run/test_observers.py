"""A package's observer follows a run, from before its backends are built until it is complete."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.spi import PluginError

from .conftest import read_metrics  # type: ignore[import-not-found]

PROVIDER = """
from rlcore.spi import LoopObserverProvider
EVENTS = LoopObserverProvider(name="events", spi=(2, 0), observer="acme_events:Events")
"""
OBSERVER = """
from rlcore.run.protocols import LoopObserver
from rlcore.spi import StorageError

SEEN, FAILING = [], "none"

def seen(event, text):
    SEEN.append(text)
    if event == FAILING:
        raise StorageError("full")

class Events(LoopObserver):
    def __init__(self, run):
        self.run = run
        seen("built", f"built for {run.recipe.run.name}")

    def on_measure(self, step, weight_version):
        return {"acme/version": float(weight_version)}

    def on_last_step(self):
        seen("ends", "ends")

    def on_close(self):
        seen("close", "close")

    def on_export(self, summary):
        seen("completes", f"completes, summary written: {self.run.directory.summary_file.exists()}")

    def on_complete(self, summary):
        seen("completed", f"completed, {summary['steps']} steps")
"""


def install(installer: Any, observer: str = OBSERVER) -> None:
    groups = {
        "rlcore.loop_observers": {"events": "acme_provider:EVENTS"},
        "rlcore.channels": {"in_process": "rlcore.registry.own_plugins:CHANNEL"},
        "rlcore.renderers": {"jinja_templates": "rlcore_text.provider:JINJA_TEMPLATES"},
    }
    installer.add("acme", groups, acme_provider=PROVIDER, acme_events=observer)


def test_it_gets_the_events_in_their_order_and_its_figures_are_the_steps(
    installer: Any, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    install(installer)
    run("run.num_steps=2", "run.name=watched")
    from acme_events import SEEN  # type: ignore[import-not-found]

    assert SEEN == [
        "built for watched",
        "ends",
        "close",
        "completes, summary written: True",
        "completed, 2 steps",
    ]
    versions = [line["acme/version"] for line in read_metrics(tmp_path / "runs" / "watched") if "acme/version" in line]
    assert versions == sorted(versions)
    assert versions


@pytest.mark.parametrize(
    ("event", "noted"), [("ends", False), ("completes", True), ("completed", False)], ids=["loop", "afterwards", "complete"]
)
def test_what_an_event_raises_ends_the_run(
    installer: Any, run: Callable[..., dict[str, Any]], tmp_path: Path, event: str, noted: bool
) -> None:
    install(installer, OBSERVER.replace('"none"', repr(event)))
    with pytest.raises(Exception, match="full") as raised:
        run("run.num_steps=2", "run.name=failed")
    assert any("--resume writes what is missing" in note for note in getattr(raised.value, "__notes__", ())) is noted
    state = json.loads((tmp_path / "runs" / "failed" / "status.json").read_text())["state"]
    assert state == ("complete" if event == "completed" else "failed")


def test_what_is_no_observer_is_refused(installer: Any, run: Callable[..., dict[str, Any]]) -> None:
    install(installer, "def Events(run):\n    return 1\n")
    with pytest.raises(PluginError, match="LoopObserver"):
        run("run.num_steps=2")

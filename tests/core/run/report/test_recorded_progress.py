"""What a run tells reaches the display and the files, and no file that cannot be written ends a run."""

from pathlib import Path

import pytest

from rlcore.run.report.progress import Progress
from rlcore.run.report.recorded_progress import RecordedProgress, read_status
from rlcore.run.report.timing import read_timeline


class Watched(Progress):
    """Every event, by its name and arguments."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def started(self, *given: object) -> None:
        self.events.append(("started", *given))

    def phase(self, *given: object) -> None:
        self.events.append(("phase", *given))

    def samples(self, *given: object) -> None:
        self.events.append(("samples", *given))

    def pool(self, *given: object) -> None:
        self.events.append(("pool", *given))

    def span(self, *given: object) -> None:
        self.events.append(("span", *given))

    def step(self, *given: object) -> None:
        self.events.append(("step", *given))

    def note(self, *given: object) -> None:
        self.events.append(("note", *given))

    def finished(self, *given: object) -> None:
        self.events.append(("finished", *given))


EVENTS: list[tuple[object, ...]] = [
    ("started", Path("there"), 0, 2),
    ("phase", "generation"),
    ("samples", 1, 2),
    ("pool", "trainer", "idle"),
    ("span", "driver", "generation", 5.0, (1.0,)),
    ("step", 1, {"loss": 0.5}),
    ("span", "driver", "checkpoint", 7.0, (2.0,)),
    ("note", "odd"),
    ("finished", {"steps": 1}),
]


def recorded(display: Progress, folder: Path) -> RecordedProgress:
    return RecordedProgress(display, status_file=folder / "status.json", timeline_file=folder / "timeline.jsonl")


def test_every_event_reaches_the_display_and_what_is_looked_at_the_files(tmp_path: Path) -> None:
    assert {name for name, *_ in EVENTS} == {
        name for name in vars(Progress) if callable(getattr(Progress, name)) and name[0] != "_"
    }
    display = Watched()
    with recorded(display, tmp_path) as progress:
        for name, *given in EVENTS:
            getattr(progress, str(name))(*given)
        running = read_status(tmp_path / "status.json")
    assert display.events == EVENTS
    assert progress.run_directory == Path("there")
    assert running is not None
    assert (running.state, running.step, running.num_steps, running.phase) == ("running", 1, 2, "generation")
    found = [(span.step, span.name, span.seconds) for span in read_timeline(tmp_path / "timeline.jsonl")]
    assert found == [(1, "generation", (1.0,)), (1, "checkpoint", (2.0,))]


def test_an_error_passes_and_stands_in_the_status(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), recorded(Progress(), tmp_path):
        raise ZeroDivisionError
    status = read_status(tmp_path / "status.json")
    assert status is not None
    assert status.state == "failed"


def test_what_an_error_cut_off_belongs_to_the_step_after(tmp_path: Path) -> None:
    """And what failed before the first step, of a run whose steps are not known yet, to none."""
    with pytest.raises(ZeroDivisionError), recorded(Progress(), tmp_path) as progress:
        progress.span("driver", "set-up", 0.0, (1.0,))
        raise ZeroDivisionError
    assert list(read_timeline(tmp_path / "timeline.jsonl")) == []
    with pytest.raises(ZeroDivisionError), recorded(Progress(), tmp_path) as progress:
        progress.started(tmp_path, 4, 9)
        progress.step(5, {})
        progress.span("driver", "generation", 1.0, (1.0,))
        raise ZeroDivisionError
    assert [(span.step, span.name) for span in read_timeline(tmp_path / "timeline.jsonl")] == [(6, "generation")]


def test_files_that_cannot_be_written_are_noted_once(tmp_path: Path) -> None:
    for name in ("status.json", "timeline.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    display = Watched()
    with recorded(display, tmp_path) as progress:
        for step in (1, 2):
            progress.phase("train")
            progress.span("driver", "train", 0.0, (1.0,))
            progress.step(step, {})
    notes = [str(text) for name, text, *_ in display.events if name == "note"]
    assert sorted(note.partition(" ")[0] for note in notes) == ["status.json", "timeline.jsonl"]

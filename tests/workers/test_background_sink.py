"""Sinks in a thread: what the tracker gets, also of a resumed run, and what becomes of its errors."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rlcore.spi import LoggedSample, StorageError
from rlcore_workers import background_sink
from rlcore_workers.background_sink import BackgroundSink

SAMPLE = LoggedSample(group=0, prompt="p", response="r", reward=1.0, advantage=None)


class Recorder:
    """A tracker that notes what it is told."""

    def __init__(self, resumed: str | None, calls: list[tuple[object, ...]]) -> None:
        self.id, self.calls = resumed or "new", calls
        calls.append(("open", resumed))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(metrics)))

    def log_samples(self, step: int, samples: Sequence[LoggedSample]) -> None:
        self.calls.append(("samples", step, len(samples)))

    def end(self, summary: Mapping[str, object] | None) -> None:
        self.calls.append(("end", summary))


def test_a_resumed_run_goes_on_behind_the_last_step_of_the_tracker(tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []
    for first, summary in ((1, None), (2, {"steps": 3})):
        sink = BackgroundSink(tmp_path / "mine.json", lambda resumed: Recorder(resumed, calls))
        for step in range(first, first + 2):
            sink.log_samples(step, [SAMPLE])
            sink.log(step, {"loss": float(step)})
        sink.close(summary)
    assert calls == [
        ("open", None),
        *[("samples", 1, 1), ("log", 1, {"loss": 1.0}), ("samples", 2, 1), ("log", 2, {"loss": 2.0})],
        *[("end", None), ("open", "new"), ("samples", 3, 1), ("log", 3, {"loss": 3.0}), ("end", {"steps": 3})],
    ]


def test_steps_have_the_names_of_another_library_and_evaluations_their_own(tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []
    sink = BackgroundSink(tmp_path / "mine.json", lambda resumed: Recorder(resumed, calls), "trl")
    sink.log(1, {"reward_mean": 0.5, "reward_std": 0.25})
    sink.log_evaluation(1, {"checkpoint_eval/a": 0.75})
    sink.close(None)
    assert calls[1:3] == [("log", 1, {"reward": 0.5, "rlcore/reward_std": 0.25}), ("log", 1, {"checkpoint_eval/a": 0.75})]


def test_evaluations_of_earlier_steps_are_written_once(tmp_path: Path) -> None:
    class OwnAxis(Recorder):
        def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
            self.calls.append(("evaluation", step, dict(metrics)))

    for kind, name in ((Recorder, "log"), (OwnAxis, "evaluation")):
        calls: list[tuple[object, ...]] = []
        for steps in ([1], [1, 2]):
            sink = BackgroundSink(tmp_path / f"{name}.json", lambda resumed: kind(resumed, calls))  # noqa: B023
            for step in steps:
                sink.log(step + 5, {"loss": 1.0})
                sink.log_evaluation(step, {"checkpoint_eval/a": 0.5})
            sink.close(None)
        assert [call for call in calls if call[-1] == {"checkpoint_eval/a": 0.5}] == [
            (name, step, {"checkpoint_eval/a": 0.5}) for step in (1, 2)
        ]


def test_figures_are_those_of_the_call(tmp_path: Path) -> None:
    calls: list[tuple[object, ...]] = []
    may_open = threading.Event()

    def opened(resumed: str | None) -> Recorder:
        may_open.wait()
        return Recorder(resumed, calls)

    sink, metrics = BackgroundSink(tmp_path / "mine.json", opened), {"loss": 1.0}
    sink.log(1, metrics)  # returns while nothing is open yet
    metrics.clear()
    assert not calls
    may_open.set()
    sink.close(None)
    assert calls == [("open", None), ("log", 1, {"loss": 1.0}), ("end", None)]


def refuse(resumed: str | None) -> Recorder:
    raise ConnectionError("no tracker")


def test_what_the_tracker_raises_is_raised_by_the_next_call(tmp_path: Path) -> None:
    sink = BackgroundSink(tmp_path / "mine.json", refuse)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "tracker mine"]
    sink.log(1, {})
    thread.join()
    with pytest.raises(ConnectionError, match="no tracker"):
        sink.log(2, {})
    ended = BackgroundSink(tmp_path / "mine.json", refuse)
    ended.log(1, {})
    with pytest.raises(ConnectionError, match="no tracker"):
        ended.close(None)


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_sink, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(background_sink, "MAX_WAITING", 2)
    release = threading.Event()

    def hang(resumed: str | None) -> Recorder:
        release.wait()
        return Recorder(resumed, [])

    sink = BackgroundSink(tmp_path / "mine.json", hang)
    sink.log(1, {})
    with pytest.raises(StorageError, match="taken|behind"):
        sink.close(None)
    full = BackgroundSink(tmp_path / "mine.json", hang)
    with pytest.raises(StorageError, match="2 calls"):
        for step in range(9):
            full.log(step, {})
    release.set()

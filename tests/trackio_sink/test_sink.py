"""Sink `trackio` against the package itself, with a database of this machine."""

from pathlib import Path

import pytest

trackio = pytest.importorskip("trackio", reason="trackio is not installed")

from trackio import utils  # noqa: E402
from trackio.sqlite_storage import SQLiteStorage  # noqa: E402

from rlcore.spi import LoggedSample, SinkContext  # noqa: E402
from rlcore_trackio.config import TrackioConfig  # noqa: E402
from rlcore_trackio.sink import TrackioSink  # noqa: E402

RECIPE = '[run]\nname = "first"\n[optimizer]\nlearning_rate = 0.5\n'
SAMPLE = LoggedSample(group=3, prompt="2+2=", response="4", reward=1.0, advantage=-0.5)


def run(directory: Path, steps: list[int], summary: dict | None) -> None:
    context = SinkContext(run_directory=directory, run_name="first", recipe=RECIPE)
    sink = TrackioSink(context, TrackioConfig(project="sums", tags=("baseline",)))
    for step in steps:
        sink.log_samples(step, [SAMPLE])
        sink.log(step, {"loss": step / 2, "evaluation/pass@1": 0.25})
    sink.close(summary)


def test_a_run_that_failed_is_resumed_as_the_same_run_without_repeated_steps(tmp_path: Path, monkeypatch) -> None:
    for module in (trackio, utils, __import__("trackio.sqlite_storage", fromlist=["x"])):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    run(tmp_path, [0, 1, 2], None)
    run(tmp_path, [2, 3], {"steps": 3})
    assert SQLiteStorage.get_runs("sums") == ["first"]
    rows = SQLiteStorage.get_logs("sums", "first")
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    assert [row["run/finished"] for row in rows if "run/finished" in row] == [0.0, 1.0]
    config = SQLiteStorage.get_run_config("sums", "first")
    assert config["optimizer"] == {"learning_rate": 0.5}
    assert config["tags"] == ["baseline"]
    tables = [row["samples"]["_value"] for row in rows if "samples" in row]
    assert tables == [[{"group": 3, "prompt": "2+2=", "response": "4", "reward": 1.0, "advantage": -0.5}]] * 4

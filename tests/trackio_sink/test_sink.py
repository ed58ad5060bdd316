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
    directory.mkdir(exist_ok=True)
    context = SinkContext(run_directory=directory, run_name="first", recipe=RECIPE)
    sink = TrackioSink(context, TrackioConfig(project="sums", tags=("baseline",)))
    for step in steps:
        sink.log_samples(step, [SAMPLE])
        sink.log(step, {"loss": step / 2, "eval/pass@1": 0.25})
    sink.close(summary)


@pytest.fixture(autouse=True)
def database(tmp_path: Path, monkeypatch) -> None:
    for module in (trackio, utils, __import__("trackio.sqlite_storage", fromlist=["x"])):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")


def test_a_run_that_failed_is_resumed_as_the_same_run_without_repeated_steps(tmp_path: Path) -> None:
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


def steps(name: str) -> list[int]:
    return [row["step"] for row in SQLiteStorage.get_logs("sums", name) if "loss" in row]


@pytest.mark.parametrize("taken", [False, True])
def test_a_renamed_run_never_resumes_another_one(tmp_path: Path, taken: bool) -> None:
    """It goes on as a new run, whether a run of another directory has its name by now or none."""
    run(tmp_path / "first", [0, 1], None)
    SQLiteStorage.rename_run("sums", "first", "renamed")
    if taken:
        run(tmp_path / "second", [0], None)
    before = SQLiteStorage.get_run_records("sums")
    run(tmp_path / "first", [1, 2], None)
    assert steps("renamed") == [0, 1]
    known = {record["id"] for record in before}
    (new,) = [record for record in SQLiteStorage.get_run_records("sums") if record["id"] not in known]
    rows = SQLiteStorage.get_logs("sums", new["name"], run_id=new["id"])
    assert [row["step"] for row in rows if "loss" in row] == [2]
    for record in before:
        rows = SQLiteStorage.get_logs("sums", record["name"], run_id=record["id"])
        assert sum("run/finished" in row for row in rows) == 1

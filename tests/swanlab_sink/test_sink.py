"""Sink `swanlab` against the package itself, in files of this machine."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

swanlab = pytest.importorskip("swanlab", reason="swanlab is not installed: it wants another protobuf than vLLM")

import yaml  # noqa: E402
from swanlab.proto.swanlab.record.v1.record_pb2 import Record  # noqa: E402
from swanlab.proto.swanlab.run.v1.run_pb2 import RunState  # noqa: E402
from swanlab.sdk.internal.core_python.store import DataStoreReader  # noqa: E402

from rlcore.spi import LoggedSample, RlcoreError, SinkContext  # noqa: E402
from rlcore_swanlab.config import SwanLabConfig  # noqa: E402
from rlcore_swanlab.sink import SwanLabSink  # noqa: E402

RECIPE = '[run]\nname = "first"\n[optimizer]\nlearning_rate = 0.5\n'
SAMPLE = LoggedSample(group=3, prompt="2+2=", response="4", reward=1.0, advantage=-0.5)


def run(directory: Path, steps: list[int], summary: dict | None) -> None:
    directory.mkdir(exist_ok=True)
    context = SinkContext(run_directory=directory, run_name="first", recipe=RECIPE)
    sink = SwanLabSink(context, SwanLabConfig(project="sums", mode="offline", group="g", tags=("baseline",)))
    for step in steps:
        sink.log_samples(step, [SAMPLE])
        sink.log(step, {"loss": step / 2, "eval/pass@1": 0.25})
    if steps:
        sink.log_evaluation(steps[0], {"checkpoint_eval/sums/exact_match,none": 0.75})
    sink.close(summary)


class Read:
    """One folder of an offline run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, ""
        self.start: Any = None
        self.figures: dict[str, list[tuple[int, float]]] = {}
        (file,) = folder.glob("*.swanlab")
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "start":
                self.start = record.start
            elif kind == "scalar":
                self.figures.setdefault(record.scalar.key, []).append((record.scalar.step, record.scalar.value.number))
            elif kind == "finish":
                self.state = record.finish.state
        reader.close()
        self.config = yaml.safe_load((folder / "files" / "config.yaml").read_text())


def folders(directory: Path) -> list[Read]:
    return [Read(folder) for folder in sorted((directory / "swanlab").glob("run-*"), key=lambda path: path.stat().st_mtime_ns)]


def test_a_run_that_failed_is_resumed_as_the_same_run_without_repeated_steps(tmp_path: Path) -> None:
    run(tmp_path, [0, 1, 2], None)
    run(tmp_path, [2, 3], {"steps": 3})
    before, after = folders(tmp_path)
    assert before.start.id == after.start.id == json.loads((tmp_path / "swanlab.json").read_text())["id"]
    assert (before.start.project, before.start.name, before.start.group, list(before.start.tags)) == (
        *("sums", "first", "g"),
        ["baseline"],
    )
    assert before.figures["loss"] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert before.figures["checkpoint_eval/sums/exact_match,none"] == [(0, 0.75)]
    assert after.figures["loss"] == [(3, 1.5)]
    assert after.figures["checkpoint_eval/sums/exact_match,none"] == [(2, 0.75)]
    assert (before.state, after.state) == (RunState.RUN_STATE_CRASHED, RunState.RUN_STATE_FINISHED)
    assert after.config["optimizer"]["value"] == {"learning_rate": 0.5}
    assert after.config["summary"]["value"] == {"steps": 3}
    assert "summary" not in before.config
    (table,) = (after.folder / "media" / "echarts").glob("*.json")
    assert json.loads(table.read_text())["rowData"] == [
        {"group": 3, "prompt": "2+2=", "response": "4", "reward": 1.0, "advantage": -0.5}
    ]


def test_a_run_is_never_resumed_as_another_one_of_its_name(tmp_path: Path) -> None:
    run(tmp_path / "one", [0], None)
    run(tmp_path / "other", [0], None)
    run(tmp_path / "one", [1], None)
    first, again = (read.start.id for read in folders(tmp_path / "one"))
    (other,) = (read.start.id for read in folders(tmp_path / "other"))
    assert first == again != other


def test_the_mode_is_the_environments_where_the_recipe_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    sink = SwanLabSink(SinkContext(run_directory=tmp_path, run_name="first", recipe=RECIPE), SwanLabConfig())
    sink.log(1, {"loss": 0.5})
    sink.close(None)
    (read,) = folders(tmp_path)
    assert read.figures == {"loss": [(1, 0.5)]}


def test_without_a_key_the_sink_says_so_and_asks_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "root"))
    monkeypatch.chdir(tmp_path)

    def refuse(*arguments: object) -> str:
        raise AssertionError("a terminal was asked")

    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", refuse)
    sink = SwanLabSink(SinkContext(run_directory=tmp_path, run_name="first", recipe=RECIPE), SwanLabConfig())
    sink.log(1, {"loss": 0.5})
    with pytest.raises(RlcoreError, match=r"no API key.*sinks\.swanlab\.mode"):
        sink.close(None)

"""Sink `wandb` against the package itself, offline."""

import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("wandb", reason="wandb is not installed")

from rlcore.spi import LoggedSample, RlcoreError, SinkContext
from rlcore_wandb.config import WandbConfig
from rlcore_wandb.sink import WandbSink

from .wandb_reading import records

RECIPE = '[run]\nname = "first"\n[optimizer]\nlearning_rate = 0.5\n'
SAMPLE = LoggedSample(group=3, prompt="2+2=", response="4", reward=1.0, advantage=-0.5)


def run(directory: Path, steps: list[int], summary: dict | None) -> None:
    context = SinkContext(run_directory=directory, run_name="first", recipe=RECIPE)
    sink = WandbSink(context, WandbConfig(mode="offline", project="sums", group="g", tags=("baseline",)))
    for step in steps:
        sink.log_samples(step, [SAMPLE])
        sink.log(step, {"loss": step / 2, "eval/pass@1": 0.25})
    sink.close(summary)


def read(file: Path) -> tuple[object, dict[int, dict[str, object]], int, dict[str, object]]:
    """The run, the figures of each step, the exit code, and the last of the summary, of a run that has ended.

    W&B's process writes by itself, and may be behind the end of the run: the last record is waited for."""
    deadline = time.monotonic() + 300
    while not any(record.WhichOneof("record_type") == "exit" for record in records(file)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found, steps, code, summary = None, {}, -1, {}
    for record in records(file):
        kind = record.WhichOneof("record_type")
        if kind == "run" and found is None:
            found = record.run
        elif kind == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            steps[record.history.step.num] = row
        elif kind == "exit":
            code = record.exit.exit_code
        elif kind == "summary":
            summary |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update}
    return found, steps, code, summary


def test_a_run_that_failed_is_resumed_as_the_same_run_without_repeated_steps(tmp_path: Path) -> None:
    run(tmp_path, [0, 1, 2], None)
    (tmp_path / "wandb").rename(tmp_path / "before")  # W&B names folders by the second
    run(tmp_path, [2, 3], {"steps": 3})
    files = [file for folder in ("before", "wandb") for file in tmp_path.glob(f"{folder}/offline-run-*/*.wandb")]
    (first, before, failed, _), (second, after, finished, summary) = map(read, files)
    assert (first.run_id, first.project, first.display_name, first.run_group) == (second.run_id, "sums", "first", "g")
    assert list(first.tags) == ["baseline"]
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert config["optimizer"] == {"learning_rate": 0.5}
    assert [(step, row["loss"], row["eval/pass@1"]) for step, row in sorted(before.items()) if "loss" in row] == [
        (0, 0.0, 0.25),
        (1, 0.5, 0.25),
        (2, 1.0, 0.25),
    ]
    assert [step for step, row in after.items() if "loss" in row] == [3]
    assert (failed, finished) == (1, 0)
    assert summary["summary/steps"] == 3
    (table,) = files[1].parent.glob("files/media/table/*.json")
    assert json.loads(table.read_text()) == {
        "columns": ["group", "prompt", "response", "reward", "advantage"],
        "data": [[3, "2+2=", "4", 1.0, -0.5]],
    }


def test_figures_of_evaluations_have_an_axis_of_their_own_and_cost_no_step(tmp_path: Path) -> None:
    context = SinkContext(run_directory=tmp_path, run_name="first", recipe=RECIPE)
    sink = WandbSink(context, WandbConfig(mode="offline"))
    sink.log(4, {"loss": 0.5})
    sink.log_evaluation(2, {"checkpoint_eval/accuracy": 0.25})
    sink.log_evaluation(3, {"checkpoint_eval/accuracy": 0.5})
    sink.log(5, {"loss": 0.25})
    sink.log(6, {"loss": 0.125})
    sink.log_evaluation(6, {"checkpoint_eval/accuracy": 0.75})
    sink.log_evaluation(7, {"checkpoint_eval/accuracy": 1.0})
    sink.close({})
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = [row for _, row in sorted(read(file)[1].items())]
    assert [row["loss"] for row in rows if "loss" in row] == [0.5, 0.25, 0.125]
    measured = [(row["checkpoint_eval/step"], row["checkpoint_eval/accuracy"]) for row in rows if "checkpoint_eval/step" in row]
    assert measured == [(2, 0.25), (3, 0.5), (6, 0.75), (7, 1.0)]


def test_the_mode_is_the_environments_where_the_recipe_has_none(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(SinkContext(run_directory=tmp_path, run_name="first", recipe=RECIPE), WandbConfig())
    sink.log(1, {"loss": 0.5})
    sink.close(None)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert read(file)[1][1]["loss"] == 0.5


def test_without_a_key_the_sink_says_so_and_asks_no_terminal(tmp_path: Path, monkeypatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    def refuse(*arguments: object) -> str:
        raise AssertionError("a terminal was asked")

    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", refuse)
    sink = WandbSink(SinkContext(run_directory=tmp_path, run_name="first", recipe=RECIPE), WandbConfig())
    sink.log(1, {"loss": 0.5})
    with pytest.raises(RlcoreError, match=r"No API key configured.*sinks\.wandb\.mode"):
        sink.close(None)

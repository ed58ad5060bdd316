"""Sink `mlflow` against the package itself, with a store of files."""

import json
from pathlib import Path

import pytest

pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")

from mlflow.tracking import MlflowClient

from rlcore.spi import LoggedSample, SinkContext
from rlcore_mlflow.config import MlflowConfig
from rlcore_mlflow.sink import MlflowSink, name_of

RECIPE = '[run]\nname = "first"\n[optimizer]\nlearning_rate = 0.5\n'


def sink(directory: Path, uri: str) -> MlflowSink:
    context = SinkContext(run_directory=directory, run_name="first", recipe=RECIPE)
    return MlflowSink(context, MlflowConfig(experiment="sums", tracking_uri=uri, tags=("team=blue", "baseline")))


def run(directory: Path, uri: str, steps: list[int], summary: dict | None) -> None:
    opened = sink(directory, uri)
    for step in steps:
        sample = LoggedSample(group=step, prompt="2+2=", response="4", reward=1.0, advantage=None)
        opened.log_samples(step, [sample])
        opened.log(step, {"loss": step / 2, "eval/pass@1": 0.25, "entropy": float("nan")})
    opened.close(summary)


def test_a_run_that_failed_is_resumed_as_the_same_run_without_repeated_steps(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'store'}"
    client = MlflowClient(tracking_uri=uri)
    run(tmp_path, uri, [0, 1, 2], None)
    experiment = client.get_experiment_by_name("sums").experiment_id
    (failed,) = client.search_runs([experiment])
    assert failed.info.status == "FAILED"
    run(tmp_path, uri, [2, 3], {"steps": 3})
    (found,) = client.search_runs([experiment])
    assert (found.info.run_id, found.info.run_name, found.info.status) == (failed.info.run_id, "first", "FINISHED")
    assert {"team": "blue", "baseline": ""}.items() <= found.data.tags.items()
    assert found.data.params == {"run.name": "first", "optimizer.learning_rate": "0.5"}
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]
    assert set(found.data.metrics) == {"loss", "eval/pass_at_1"}
    artifacts = Path(found.info.artifact_uri.removeprefix("file://"))
    assert json.loads((artifacts / "summary.json").read_text()) == {"steps": 3}
    assert (artifacts / "recipe.toml").read_text() == RECIPE
    table = json.loads((artifacts / "samples.json").read_text())
    assert table["columns"] == ["step", "group", "prompt", "response", "reward", "advantage"]
    assert table["data"][-1] == [3, 3, "2+2=", "4", 1.0, None]
    assert len(table["data"]) == 4


@pytest.mark.parametrize("name", ["pass@1", "rewards/right (%)", "sets//x", "/a", "a/../b", "x" * 300, "größe", "step.s: a-b"])
def test_names_of_any_kind_become_names_of_mlflows(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name

    _validate_metric_name(name_of(name))
    _validate_param_name(name_of(name))


def test_a_server_that_is_away_holds_nothing_up_and_is_told_at_the_end(tmp_path: Path) -> None:
    opened = sink(tmp_path, "http://127.0.0.1:9")
    opened.log(1, {"loss": 1.0})
    with pytest.raises(Exception, match="127.0.0.1"):
        opened.close(None)


def test_of_two_runs_that_begin_together_both_are_in_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds that there is none of the name."""
    uri, looked = f"file://{tmp_path / 'store'}", MlflowClient.get_experiment_by_name
    client = MlflowClient(tracking_uri=uri)

    def at_the_same_time(self: MlflowClient, name: str) -> object:
        monkeypatch.undo()
        found = looked(self, name)
        client.create_experiment(name)
        return found

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", at_the_same_time)
    run(tmp_path, uri, [1], {})
    (found,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (found.info.run_name, found.info.status) == ("first", "FINISHED")

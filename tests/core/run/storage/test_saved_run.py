"""A run read back from its directory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rlcore.run.report.recorded_progress import read_status
from rlcore.run.report.timing import read_timeline
from rlcore.run.storage.run_directory import RunDirectory
from rlcore.run.storage.saved_run import SavedRun
from rlcore.spi import CheckpointError


def samples(step: int) -> pa.Table:
    """The table of a step's two samples."""
    floats, texts, truths = [0.5, -0.5], ["a", "b"], [True, False]
    return pa.table(
        {
            **{name: [step, step] for name in ("step", "group", "num_generated")},
            **dict.fromkeys(("prompt", "response", "finish_reason"), texts),
            **dict.fromkeys(("success", "valid"), truths),
            "reward": floats,
            "tokens": [[1, 2], [3]],
            "loss_mask": [truths, truths[:1]],
            "generation_logprobs": [floats, floats[:1]],
        }
    )


def advantages(values: list[Any]) -> pa.Table:
    return samples(1).append_column("advantages", pa.array(values))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A run directory of three steps, two of whose samples were kept."""
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    (run / "recipe.toml").write_text("[run]\nname = 'run'\n")
    records = [{"step": 0, "eval/pass@1": 0.5}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in (1, 10):
        parquet.write_table(samples(step), run / "rollouts" / f"step-{step:06d}.parquet")
    for step in (1, 10, 2):
        (run / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step:06d}" / "manifest.json").write_text("{}")
    return run


def test_everything_that_a_run_has_left(directory: Path) -> None:
    run = SavedRun.find(str(directory))
    assert run.recipe == {"run": {"name": "run"}}
    assert (run.summary, run.model) == ({}, None)
    assert list(run.metrics) == ["step", "eval/pass@1", "loss"]
    np.testing.assert_array_equal(run.metrics["loss"], [np.nan, 2.0, 1.0])
    np.testing.assert_array_equal(run.metrics["eval/pass@1"], [0.5, np.nan, np.nan])
    assert [path.name for path in run.checkpoints] == ["step-000001", "step-000002", "step-000010"]
    assert run.saved_steps() == [1, 10]
    assert run.samples()["step"].to_pylist() == [10, 10]
    assert run.samples(1)["step"].to_pylist() == [1, 1]
    (directory / "model").mkdir()
    (directory / "summary.json").write_text('{"steps": 2}')
    assert (run.summary, run.model) == ({"steps": 2}, directory / "model")


def test_what_is_not_there_is_said_with_what_is(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="step 2.*steps 1, 10.*rollouts_every_n_steps"):
        SavedRun.find(directory).samples(2)
    for file in (directory / "rollouts").glob("*.parquet"):
        file.unlink()
    with pytest.raises(CheckpointError, match="any step; found none"):
        SavedRun.find(directory).samples()
    with pytest.raises(CheckpointError, match="no run in"):
        SavedRun.find(directory / "rollouts")


READERS = {
    "metrics.jsonl": lambda directory: SavedRun.find(directory).metrics,
    "summary.json": lambda directory: SavedRun.find(directory).summary,
    "timeline.jsonl": lambda directory: read_timeline(directory / "timeline.jsonl"),
    "status.json": lambda directory: read_status(directory / "status.json"),
    "environment.json": lambda directory: RunDirectory(path=directory).versions,
    ".last-saved": lambda directory: RunDirectory(path=directory).last_saved,
}


@pytest.mark.parametrize("target", ["gone", None], ids=["dangling", "loop"])
@pytest.mark.parametrize("name", READERS)
def test_a_link_that_leads_to_no_file_is_named(directory: Path, name: str, target: str | None) -> None:
    (directory / name).unlink(missing_ok=True)
    assert not READERS[name](directory)
    (directory / name).symlink_to(target or name)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        READERS[name](directory)


def replaced(name: str, values: list[Any]) -> pa.Table:
    table = samples(1)
    return table.set_column(table.column_names.index(name), name, pa.array(values))


TABLES = {
    "nothing": (pa.table({}), "no columns 'step', no columns 'group'"),
    **{f"no {name}": (samples(1).drop_columns([name]), f"no columns {name!r}") for name in samples(1).column_names},
    "text for numbers": (replaced("reward", ["1", "2"]), "'reward' of type string"),
    "a number for tokens": (replaced("tokens", [1, 2]), "'tokens' of type int64"),
    "texts for tokens": (replaced("tokens", [["a"], ["b"]]), "'tokens' of type list<element: string>"),
    "lists for numbers": (replaced("group", [[1], [2]]), "'group' of type list<element: int64>"),
    "a null": (replaced("prompt", ["a", None]), "nulls in 'prompt'"),
    "nulls alone": (replaced("valid", [None, None]), "'valid' of type null"),
    "a null in a list": (replaced("loss_mask", [[True, None], [True]]), "nulls in 'loss_mask'"),
    "other lengths": (replaced("generation_logprobs", [[0.5], [0.5]]), "'generation_logprobs' of other lengths than 'tokens'"),
    "advantages of other lengths": (advantages([[0.5], [0.5]]), "'advantages' of other lengths than 'tokens'"),
    "texts for advantages": (advantages([["a", "b"], ["c"]]), "'advantages' of type list<element: string>"),
    "a number for advantages": (advantages([0.5, 0.5]), "'advantages' of type double"),
    "a null in advantages": (advantages([[0.5, None], [0.5]]), "nulls in 'advantages'"),
}


@pytest.mark.parametrize(("table", "found"), TABLES.values(), ids=TABLES)
def test_a_table_of_other_columns_names_them(directory: Path, table: pa.Table, found: str) -> None:
    parquet.write_table(table, directory / "rollouts" / "step-000001.parquet")
    with pytest.raises(CheckpointError) as raised:
        SavedRun.find(directory).samples(1)
    assert found in str(raised.value)
    assert "step-000001.parquet is damaged, or of another version: found " in str(raised.value)

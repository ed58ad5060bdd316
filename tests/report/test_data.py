"""All that a page shows of some runs."""

from pathlib import Path

import pytest

from rlcore.spi import CheckpointError
from rlcore_report.data import report_data

from .made_runs import make_run


def test_two_runs_beside_each_other(tmp_path: Path) -> None:
    data = report_data([make_run(tmp_path / name / "run", num) for name, num in (("a", 20), ("b", 60))])
    first, second = data["runs"]
    assert (first["label"], second["label"]) == ("a/run", "b/run")
    assert dict(data["differences"])["optimizer.learning_rate"] == ["2e-05", "6e-05"]
    assert (first["recipe"]["version.torch"], first["state"], first["error"]) == ("2.13.0", "ended", "")
    assert [section["title"] for section in data["sections"]] == ["Learning", "Speed", "Other figures"]
    shown = [name for section in data["sections"] for name in section["metrics"]]
    assert sorted(shown) == sorted({*first["metrics"], *second["metrics"]})
    assert len(second["time"]["values"][0]) == len(data["phases"])
    entry = second["timeline"][-1]
    assert (entry["step"], len(second["timeline"])) == (60, 12)
    assert entry["spans"] == [
        ["driver", "generation", 0.0, 4.0],
        ["driver", "train", 4.0, 5.0],
        ["trainer 0", "train_step", 4.0, 4.0],
        ["trainer 1", "train_step", 4.0, 5.0],
    ]


def test_memory_has_its_own_section(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    (run / "metrics.jsonl").write_text('{"step": 1, "memory/trainer_idle_gib": 1.5}\n')
    assert report_data([run])["sections"] == [{"title": "Memory", "metrics": ["memory/trainer_idle_gib"], "open": True}]


def test_a_run_of_which_little_is_there(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("")
    (run,) = report_data([tmp_path])["runs"]
    assert (run["metrics"], run["timeline"], run["spreads"], run["samples"], run["no_pieces"]) == ({}, [], [], [], "")


def test_the_same_run_twice_has_two_names(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2)
    assert [each["label"] for each in report_data([run, run])["runs"]] == ["run (1)", "run (2)"]


def test_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run in"):
        report_data([tmp_path])

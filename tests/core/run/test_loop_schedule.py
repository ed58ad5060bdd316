"""The recipe's optimizer and schedule reach the trainer, over all updates of the run and through a restart."""

from pathlib import Path

import pytest

from .conftest import read_metrics  # type: ignore[import-not-found]

SCHEDULE = ("optimizer.learning_rate=0.2", "schedule.warmup_steps=4", "schedule.decay=linear")


def rates(tmp_path: Path, name: str) -> list[float]:
    return [record["learning_rate"] for record in read_metrics(tmp_path / "runs" / name) if "learning_rate" in record]


def test_learning_rates_are_those_of_the_recipe(run, tmp_path: Path) -> None:
    run("run.name=short", "run.num_steps=2", "checkpoint.every_n_steps=1", *SCHEDULE)
    assert rates(tmp_path, "short") == pytest.approx([0.2 * share for share in (0.375, 0.875)])
    run("run.name=short", *SCHEDULE, resume=True)
    run("run.name=whole", *SCHEDULE)
    shares = (0.375, 0.875, 0.9375, 0.6875, 0.4375, 0.1875)
    assert rates(tmp_path, "whole") == pytest.approx([0.2 * share for share in shares])
    assert rates(tmp_path, "short") == rates(tmp_path, "whole")

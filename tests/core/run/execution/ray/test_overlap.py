"""Generation that goes on while the trainer trains, on devices of its own: no prompt lost or repeated, whatever dies."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from .conftest import Notes, read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("local_ray")

OVERLAPPING = (
    "algorithm.ranked.generation_ratio=true",
    "async.max_staleness=2",
    "cluster.gpus_per_node=2",
    "cluster.placement=separate",
    "cluster.generator_gpus_per_node=1",
    "environment.ranked.num_train_rows=64",
    "logging.rollouts_every_n_steps=1",
    "run.num_steps=6",
    "training.updates_per_step=1",
)


def rollouts(directory: Path) -> pandas.DataFrame:
    return pandas.concat([pandas.read_parquet(path) for path in sorted((directory / "rollouts").glob("*.parquet"))])


def assert_each_prompt_once(directory: Path) -> None:
    prompts = Counter(rollouts(directory).groupby(["step", "group"])["prompt"].first())
    assert (set(prompts.values()), prompts.total()) == ({1}, 36)


def test_samples_go_on_through_refits_in_flight(run: Run, tmp_path: Path) -> None:
    run(*OVERLAPPING, "trainer.ranked.pause_s=0.2")
    directory = tmp_path / "runs" / "run"
    assert_each_prompt_once(directory)
    records = [record for record in read_metrics(directory) if "async/staleness_max" in record]
    assert len(records) == 6
    assert 0 < max(record["async/staleness_max"] for record in records) <= 2
    for sample in rollouts(directory).itertuples():
        versions = np.asarray(sample.weight_versions)[np.asarray(sample.loss_mask)]
        assert (np.diff(versions) >= 0).all()


def test_a_worker_that_dies_while_training_loses_no_prompt(run: Run, tmp_path: Path) -> None:
    notes = Notes()
    fault = ("trainer.ranked.fault={kind='die', rank=0, hook='train_step', version=3}", f"trainer.ranked.folder={tmp_path}")
    run(*OVERLAPPING, *fault, "cluster.max_restarts=1", "checkpoint.every_n_steps=1", progress=notes)
    assert any("restart 1 of 1" in note for note in notes.texts)
    assert_each_prompt_once(tmp_path / "runs" / "run")


def test_replays_of_refits_in_flight_equal_one_another(run: Run, tmp_path: Path) -> None:
    """Nothing goes on while the trainer trains, and what saw new weights in mid-turn is said to be another sample."""
    options = (*OVERLAPPING, "trainer.ranked.pause_s=0.2", "environment.ranked.num_turns=2", "rollout.max_turns=2")
    runs = {name: tmp_path / "runs" / name for name in ("first", "again", "third")}
    notes = Notes()
    run(*options, "run.name=first")
    for name in ("again", "third"):
        run(*options, f"run.name={name}", replay_schedule=runs["first"] / "schedule.jsonl", progress=notes)
    assert read_metrics(runs["again"]) == read_metrics(runs["third"])
    assert rollouts(runs["again"]).equals(rollouts(runs["third"]))
    schedules = {name: (directory / "schedule.jsonl").read_text().splitlines()[1:] for name, directory in runs.items()}
    assert schedules["again"] == schedules["third"]
    assert_each_prompt_once(runs["again"])
    for line, other in zip(schedules["first"], schedules["again"], strict=True):
        numbers = [[group["number"] for group in json.loads(text)["groups"]] for text in (line, other)]
        assert numbers[0] == numbers[1]
    in_flight = ['"in_flight":true' in line for line in schedules["first"]]
    assert any(in_flight) == bool([note for note in notes.texts if note.startswith("replay")])

"""Generation that goes on while the trainer trains, on devices of its own: no prompt lost or repeated, whatever dies."""

import json
import os
import re
import signal
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
    "training.minibatches_per_step=1",
)


def rollouts(directory: Path) -> pandas.DataFrame:
    return pandas.concat([pandas.read_parquet(path) for path in sorted((directory / "rollouts").glob("step-*.parquet"))])


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


@pytest.mark.wide  # above a worker dies, and test_pool_failures.py has a rank of the reference
def test_a_rank_of_the_reference_that_dies_loses_no_prompt(run: Run, tmp_path: Path) -> None:
    """Whoever finds it dead first, the stream or what asks it next: all workers are started anew."""
    log = tmp_path / "runs" / "run" / "logs" / "reference-rank-0.log"

    class Kills(Notes):
        def step(self, step: int, metrics: Any) -> None:
            if step == 1 and not any("restart" in text for text in self.texts):  # later steps' groups are not begun yet
                os.kill(int(re.findall(r"process (\d+)\)", log.read_text())[-1]), signal.SIGKILL)

    notes = Kills()
    apart = ("cluster.gpus_per_node=3", "cluster.reference_gpus_per_node=1", "algorithm.ranked.kl_coefficient=0.1")
    run(*OVERLAPPING, *apart, "cluster.max_restarts=1", "checkpoint.every_n_steps=1", progress=notes)
    (restart,) = [note for note in notes.texts if "restart 1 of 1" in note]
    assert re.search(r"reference rank 0 \(node .*\) died", restart)
    assert_each_prompt_once(tmp_path / "runs" / "run")


@pytest.mark.wide  # tests/replay has a run that was killed and resumed
def test_a_replay_has_the_batches_of_the_run_also_where_a_worker_dies(run: Run, tmp_path: Path) -> None:
    """It goes on from its checkpoint, by the file."""
    options = (*OVERLAPPING, "environment.ranked.num_turns=2", "rollout.max_turns=2", "checkpoint.every_n_steps=2")
    first, again = (tmp_path / "runs" / name for name in ("first", "again"))
    run(*options, "trainer.ranked.pause_s=0.2", "run.name=first")
    notes = Notes()
    fault = ("trainer.ranked.fault={kind='die', rank=0, hook='train_step', version=3}", f"trainer.ranked.folder={tmp_path}")
    replayed = ("cluster.max_restarts=1", "run.name=again")
    run(*options, *fault, *replayed, progress=notes, replay_schedule=first / "schedule.jsonl")
    assert any("restart 1 of 1" in note for note in notes.texts)
    assert_each_prompt_once(again)
    steps = [[json.loads(line) for line in (path / "schedule.jsonl").read_text().splitlines()[1:]] for path in (first, again)]
    numbers = [[[group["number"] for group in step["groups"]] for step in found] for found in steps]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 6

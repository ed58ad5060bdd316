"""Samples and answers of a run, kept with their advantages and shown."""

import numpy as np
import pytest

import rlcore

from .system_support import Workplace, expect_failure  # type: ignore[import-not-found]


@pytest.fixture
def trained(workplace: Workplace) -> Workplace:
    workplace.train("grpo.toml", "run.num_steps=2", "evaluation.every_n_steps=1", "logging.rollouts_every_n_steps=1")
    return workplace


def test_advantages_are_kept_with_the_samples_and_shown(trained: Workplace) -> None:
    rows = rlcore.load(trained.run("run")).samples(1).to_pylist()
    rewards = np.array([row["reward"] for row in rows]).reshape(4, 4)
    centred = (rewards - rewards.mean(1, keepdims=True)).ravel()
    for row, reward in zip(rows, centred, strict=True):
        tokens = np.array(row["advantages"])
        assert len(tokens) == len(row["tokens"])
        assert set(np.sign(np.round(tokens[row["loss_mask"]], 6))) == {np.sign(np.round(reward, 6))}
    result = trained.rlcore("show", trained.run("run"), "--step", "1", "--group", "2")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("step 1: 16 samples in 4 groups")
    assert sum(line.startswith("  reward ") for line in lines) == 4
    assert f"    | {rows[8]['prompt']}" in lines


def test_answers_of_evaluations_are_kept_unless_the_recipe_says_otherwise(trained: Workplace) -> None:
    run = rlcore.load(trained.run("run"))
    assert run.saved_steps("evaluation") == [0, 1, 2]
    for step in (0, 1, 2):
        answers = run.answers(step).to_pylist()
        assert len(answers) == 8
        assert np.mean([row["success"] for row in answers]) == pytest.approx(run.metrics["eval/pass@1"][step])
    result = trained.rlcore("show", trained.run("run"), "--evaluation", "--groups", "1")
    assert result.stdout.startswith("step 2: 8 samples in 8 groups")
    assert "advantage" not in result.stdout
    trained.train("grpo.toml", "run.name=none", "run.num_steps=1", "logging.evaluation_answers=false")
    message = expect_failure(trained.rlcore("show", trained.run("none"), "--evaluation"), 6)
    assert "logging.evaluation_answers" in message


def test_a_resumed_run_writes_what_follows_its_checkpoint_again(trained: Workplace) -> None:
    run = trained.run("run")
    before = (run / "rollouts" / "evaluation-000002.parquet").read_bytes()
    (run / "rollouts" / "evaluation-000003.parquet").write_bytes(b"")
    trained.train("grpo.toml", "run.num_steps=3", "evaluation.every_n_steps=1", "logging.rollouts_every_n_steps=1", "--resume")
    assert (run / "rollouts" / "evaluation-000002.parquet").read_bytes() == before
    assert len(rlcore.load(run).answers(3)) == 8


def test_what_is_no_run_is_said(trained: Workplace) -> None:
    expect_failure(trained.rlcore("show", trained.folder), 6, "found no run")
    expect_failure(trained.rlcore("show", trained.run("run"), "--step", "7"), 6, "step 7", "steps 1, 2")

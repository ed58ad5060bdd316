"""Whole runs with the fakes: what a run learns, leaves behind, and does when it is killed, stopped or given nothing."""

import itertools
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas
import pytest

from rlcore.registry.discovery import Registry
from rlcore.run.report.progress import Progress
from rlcore.spi import (
    BoundError,
    CheckpointError,
    InterruptedRun,
    RewardError,
    StepResult,
    Turn,
)
from rlcore.testing.fakes import FakeTokenizer, fake_registry
from rlcore.testing.fakes.environment import FakeEnvironment

from .conftest import read_metrics  # type: ignore[import-not-found]

Run = Callable[..., dict[str, Any]]


class Killed(BaseException):
    """Nothing handles it, as nothing handles a kill."""


class DiesAfter(Progress):
    """Ends the process's work, as a kill would, once a step's metrics are written."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.last:
            raise Killed


class PressesCtrlC(Progress):
    """Sends SIGINT in a phase of a step, so many times."""

    def __init__(self, phase: str, occurrence: int, times: int = 1) -> None:
        self.at, self.occurrence, self.times = phase, occurrence, times

    def phase(self, name: str) -> None:
        if name == self.at:
            self.occurrence -= 1
            if self.occurrence == 0:
                for _ in range(self.times):
                    os.kill(os.getpid(), signal.SIGINT)


def test_a_run_learns_and_leaves_everything_behind(run: Run, tmp_path: Path) -> None:
    summary = run("run.num_steps=12", "run.seed=1")
    directory = tmp_path / "runs" / "run"
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
    assert summary["seed"] == 1
    assert json.loads((directory / "summary.json").read_text()) == summary
    records = read_metrics(directory, timed=True)
    assert [record["step"] for record in records] == list(range(13))
    assert [record["step"] for record in records if "eval/pass@1" in record] == [0, 4, 8, 12]
    names = {"reward_mean", "reward_std", "response_length_mean", "grad_norm", "token_mult_prob_error", "entropy", "loss"}
    assert names <= records[1].keys()
    assert records[-1]["weight_version"] == 24
    for record in records[1:]:
        parts = [record[f"time/{name}_s"] for name in ("generation", "rewards", "logprobs", "train", "refit", "other")]
        assert sum(parts) == pytest.approx(record["time/total_s"], abs=1e-6)
        assert 0.0 < record["time/trainer_idle_s"] < record["time/total_s"]
        assert 0.0 < record["time/generator_idle_s"] < record["time/total_s"]
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["step-000010", "step-000012"]
    versions = json.loads((directory / "environment.json").read_text())
    assert versions["distributions"]["rlcore"]


def test_the_resolved_recipe_runs_again_to_the_same_metrics(run: Run, tmp_path: Path) -> None:
    from rlcore.run.plan.prepare import prepare
    from rlcore.run.train import train

    run()
    written = tmp_path / "runs" / "run" / "recipe.toml"
    again = prepare(written, ["run.name=again"], registry=fake_registry())
    train(again, resume=False, progress=Progress(), tokenizer=FakeTokenizer())
    assert read_metrics(tmp_path / "runs" / "again") == read_metrics(tmp_path / "runs" / "run")


@pytest.mark.wide(sample=2)
@pytest.mark.parametrize("killed_after", [1, 2, 3, 5])
def test_a_killed_run_resumes_to_the_metrics_of_an_undisturbed_one(run: Run, tmp_path: Path, killed_after: int) -> None:
    run("run.name=whole")
    with pytest.raises(Killed):
        run("run.name=killed", progress=DiesAfter(killed_after))
    run("run.name=killed", resume=True)
    assert read_metrics(tmp_path / "runs" / "killed") == read_metrics(tmp_path / "runs" / "whole")


@pytest.mark.wide(sample=3)
@pytest.mark.parametrize(
    ("phase", "occurrence"), [("generation", 3), ("generation", 4), ("train", 3), ("train", 4), ("refit", 3)]
)
def test_ctrl_c_saves_a_checkpoint_and_the_run_resumes_exactly(run: Run, tmp_path: Path, phase: str, occurrence: int) -> None:
    run("run.name=whole")
    with pytest.raises(InterruptedRun, match="--resume"):
        run("run.name=stopped", "checkpoint.every_n_steps=0", progress=PressesCtrlC(phase, occurrence))
    run("run.name=stopped", "checkpoint.every_n_steps=0", resume=True)
    assert read_metrics(tmp_path / "runs" / "stopped") == read_metrics(tmp_path / "runs" / "whole")


@pytest.mark.parametrize("call", [150, 200], ids=["rollouts", "evaluation"])
def test_an_environment_that_interrupts_ends_a_run_as_ctrl_c_does(
    run: Run, registry_with: Callable[..., Registry], tmp_path: Path, call: int
) -> None:
    calls = itertools.count()

    class Interrupting(FakeEnvironment):
        async def step(self, state: Any, turn: Turn) -> StepResult:
            if next(calls) == call:
                raise KeyboardInterrupt
            return await super().step(state, turn)

    options = ("evaluation.every_n_steps=3", "evaluation.at_start=false", "checkpoint.every_n_steps=0", "run.num_steps=4")
    run("run.name=whole", *options)
    with pytest.raises(InterruptedRun, match="--resume"):
        run("run.name=stopped", *options, registry=registry_with(environment=Interrupting))
    run("run.name=stopped", *options, resume=True)
    assert read_metrics(tmp_path / "runs" / "stopped") == read_metrics(tmp_path / "runs" / "whole")


def test_a_second_ctrl_c_ends_at_once_and_saves_nothing_half_done(run: Run, tmp_path: Path) -> None:
    with pytest.raises(InterruptedRun, match="middle of step 3"):
        run(progress=PressesCtrlC("train", 5, times=2))
    run(resume=True)
    run("run.name=whole")
    assert read_metrics(tmp_path / "runs" / "run") == read_metrics(tmp_path / "runs" / "whole")


def test_an_existing_run_is_not_overwritten(run: Run) -> None:
    run()
    with pytest.raises(CheckpointError, match="--resume"):
        run()


def test_nothing_to_resume_is_said(run: Run) -> None:
    with pytest.raises(CheckpointError, match="nothing to resume"):
        run(resume=True)


def test_resuming_another_model_is_refused(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": len(name), "name": name}))
    run("run.num_steps=2", f"model.path={tmp_path / 'one'}")
    with pytest.raises(CheckpointError, match="another model"):
        run("run.num_steps=4", f"model.path={tmp_path / 'two'}", resume=True)


def test_an_episode_of_several_turns_is_one_sequence(run: Run, tmp_path: Path) -> None:
    run("environment.fake.num_turns=3", "rollout.max_turns=3", "rollout.max_response_tokens=40", "run.num_steps=3")
    table = pandas.read_parquet(tmp_path / "runs" / "run" / "rollouts" / "step-000003.parquet")
    for _, row in table.iterrows():
        generated = row["loss_mask"]
        assert (row["weight_versions"][generated] == 4).all()
        assert (row["weight_versions"][~generated] == -1).all()
        assert (row["generation_logprobs"][~generated] == 0).all()
    starts = table["loss_mask"].map(lambda mask: int(((~mask[:-1]) & mask[1:]).sum()))
    assert starts.max() == 3


def test_all_rewards_equal_makes_no_update_and_says_so(run: Run, tmp_path: Path) -> None:
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    run('environment.fake.target="~"', "run.num_steps=2", progress=progress)
    records = read_metrics(tmp_path / "runs" / "run")
    assert [record["updates"] for record in records[1:]] == [0, 0]
    assert records[-1]["weight_version"] == 0
    assert len([note for note in notes if "nothing to learn from" in note]) == 2


def test_all_rewards_equal_ends_the_run_where_the_recipe_says_so(run: Run) -> None:
    with pytest.raises(RewardError, match="training.on_no_signal"):
        run('environment.fake.target="~"', 'training.on_no_signal="error"')


def test_disagreement_of_generator_and_trainer_ends_the_run(run: Run) -> None:
    with pytest.raises(BoundError, match="token_mult_prob_error"):
        # Its uniform draws are those of the initial weights, and no longer once these have changed.
        run("generator.fake.instant=true", "rollout.stop_token_ids=[]", "training.max_token_mult_prob_error=1.001")

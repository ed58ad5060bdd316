"""Runs from Python: functions, environments and rows of the program, also within an event loop, with nothing left behind."""

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import rlcore
from rlcore.spi import InterruptedRun, Observation, ResetResult, RewardError, StepResult

from .system_support import Workplace, read_metrics  # type: ignore[import-not-found]

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]
BOTH = {"train": SUMS, "evaluation": SUMS[:4]}
NOT_MEASURED = ("evaluation.at_start=false", "evaluation.at_end=false")
SHORT = ("run.num_steps=2", "logging.rollouts_every_n_steps=1", "evaluation.at_start=false")


def even(completion: str) -> float:
    """The share of digits that are even."""
    return sum(letter in "02468" for letter in completion) / 4


async def begins(completion: str, answer: str) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"reward": completion[:1] == answer[:1], "success": completion == answer}


def what_is_there() -> tuple[Any, ...]:
    """Threads, processes and signal handlers."""
    threads = {thread.name for thread in threading.enumerate() if thread.is_alive()}
    children = {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}
    return threads, children, tuple(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))


@pytest.fixture(autouse=True)
def nothing_is_left(workplace: Workplace) -> Any:
    before = what_is_there()
    yield
    assert what_is_there() == before


def test_functions_and_rows_of_the_program(workplace: Workplace) -> None:
    run = rlcore.train("grpo.toml", *SHORT, reward=[even, begins], dataset=BOTH, progress="silent")
    samples = run.samples().to_pylist()
    assert len(samples) == 16
    for sample in samples:
        answer = next(row["answer"] for row in SUMS if row["prompt"] == sample["prompt"])
        assert sample["reward"] == pytest.approx(even(sample["response"]) + (sample["response"][:1] == answer[:1]))
    assert run.metrics["step"].tolist() == [1, 2]
    assert run.summary["steps"] == 2
    assert len(run.checkpoints) == 1
    again = rlcore.load(run.path)
    np.testing.assert_array_equal(again.metrics["environment/even"], run.metrics["environment/even"])

    found = rlcore.evaluate("grpo.toml", reward=begins, dataset=SUMS[:4], checkpoint=run.checkpoints[-1], progress="silent")
    assert found["eval/pass@1"] == pytest.approx(run.metrics["eval/pass@1"][-1])


def test_a_resumed_run_is_the_whole_one(workplace: Workplace) -> None:
    options: dict[str, Any] = {"reward": even, "dataset": BOTH, "progress": "silent"}
    no_evaluation = ("evaluation.at_end=false",)
    whole = rlcore.train("grpo.toml", *SHORT, *no_evaluation, "run.name=whole", "checkpoint.every_n_steps=1", **options)
    parts = ("checkpoint.every_n_steps=1", "run.name=parts")
    rlcore.train("grpo.toml", *SHORT, *no_evaluation, *parts, "run.num_steps=1", **options)
    resumed = rlcore.train("grpo.toml", *SHORT, *no_evaluation, *parts, resume=True, **options)
    assert read_metrics(resumed.path)[-1] == read_metrics(whole.path)[-1]


def test_each_step_learns_from_as_many_groups_with_a_signal_also_behind_a_checkpoint(workplace: Workplace) -> None:
    """Whose rewards differ, by the saved samples; those that were left out are neither lost nor repeated by a resumed run."""

    def first(completion: str) -> float:
        return float(completion[:1] in ("0", "2", "4", "6", "8"))

    refills = ("rollout.dynamic_sampling=true", "rollout.max_refill_ratio=20", "rollout.samples_per_prompt=2")
    options = (*refills, "logging.rollouts_every_n_steps=1", "checkpoint.every_n_steps=1", *NOT_MEASURED)
    given: dict[str, Any] = {"reward": first, "dataset": BOTH, "progress": "silent"}
    whole = rlcore.train("grpo.toml", *options, "run.name=whole", "run.num_steps=3", **given)
    for step in (1, 2, 3):
        samples = whole.samples(step).to_pylist()
        rewards = [{sample["reward"] for sample in samples if sample["group"] == group} for group in range(4)]
        assert rewards == [{0.0, 1.0}] * 4
    assert whole.metrics["async/groups_refilled"].sum() > 0
    rlcore.train("grpo.toml", *options, "run.name=parts", "run.num_steps=2", **given)
    resumed = rlcore.train("grpo.toml", *options, "run.name=parts", "run.num_steps=3", resume=True, **given)
    # A group that replaces another begins when other samples end, and is computed beside others: sums are rounded otherwise.
    for found, expected in zip(read_metrics(resumed.path), read_metrics(whole.path), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


class Adds:
    """Rewards what is said of two turns."""

    async def reset(self, row: Any, seed: int) -> ResetResult:
        return ResetResult(observation=Observation(text=row["prompt"]), state=0)

    async def step(self, state: Any, turn: Any) -> StepResult:
        again = Observation(text="1+1=") if state == 0 else None
        return StepResult(reward=float(len(set(turn.text))), done=state == 1, observation=again, state=1)

    def rows(self, split: str) -> Any:
        return SUMS if split == "train" else None


def test_an_environment_of_the_program_within_an_event_loop(workplace: Workplace, model: Path) -> None:
    recipe = {"extends": "grpo.toml", "model": {"path": model}, "rollout": {"max_turns": 2, "max_response_tokens": 16}}
    overrides = (*SHORT, "rollout.max_turn_tokens=4", "evaluation.at_end=false")

    async def notebook() -> Any:
        """As a cell of a notebook is run."""
        return rlcore.train(recipe, *overrides, environment=Adds(), dataset=BOTH, progress="silent")

    run = asyncio.run(notebook())
    assert run.recipe["environment"]["name"] == "python"
    for sample in run.samples().to_pylist():
        assert 2.0 <= sample["reward"] <= sample["num_generated"]


def test_the_rows_of_a_recipe(workplace: Workplace) -> None:
    rows = rlcore.rows("grpo.toml")
    assert len(rows) == 60
    assert {"prompt", "answer"} <= rows[0].keys()
    assert len(rlcore.rows("grpo.toml", split="evaluation")) == 8


def test_what_a_function_raises_ends_the_run_and_leaves_nothing(workplace: Workplace) -> None:
    def fails(completion: str) -> float:
        raise ValueError(completion)

    with pytest.raises(RewardError, match="'fails' raised ValueError at test_python.py"):
        rlcore.train("grpo.toml", *SHORT, reward=fails, dataset=BOTH, progress="silent")


def test_ctrl_c_saves_and_says_so(workplace: Workplace) -> None:
    seen = []

    def presses(completion: str) -> float:
        seen.append(completion)
        if len(seen) == 20:
            signal.raise_signal(signal.SIGINT)
        return float(len(completion))

    with pytest.raises(InterruptedRun):
        rlcore.train("grpo.toml", *SHORT, "evaluation.at_end=false", reward=presses, dataset=BOTH, progress="silent")
    run = rlcore.load(workplace.run("run"))
    assert [path.name for path in run.checkpoints] == ["step-000001"]

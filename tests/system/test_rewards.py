"""Rewards from a function in a file beside the recipe, through whole runs: alone, resumed, on Ray, and with what can fail."""

import json
from pathlib import Path

import psutil
import pyarrow.parquet as parquet
import pytest

from .system_support import Workplace, close, expect_failure, read_metrics, write_jsonl  # type: ignore[import-not-found]

REWARDS = '''
import asyncio

def even(completion):
    """The share of digits that are even."""
    digits = [int(letter) for letter in completion if letter.isdigit()]
    return sum(digit % 2 == 0 for digit in digits) / 4

async def begins(completion, answer, row):
    await asyncio.sleep(0)
    assert row["answer"] == answer
    return {"reward": completion[:1] == answer[:1], "success": completion == answer, "length": len(completion)}
'''
SECTION = """
extends = "grpo.toml"
[run]
num_steps = 2
[environment]
name = "function"
[environment.function]
path = ["rewards.py:even", "rewards.py:begins"]
weights = {begins = 0.5}
[data.train]
source = "jsonl"
path = "sums.jsonl"
[data.evaluation]
source = "jsonl"
path = "sums.jsonl"
limit = 4
[checkpoint]
every_n_steps = 1
[logging]
rollouts_every_n_steps = 1
"""
SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    """With the recipe recipes/rewarded.toml, and its function beside it."""
    folder = workplace.folder / "recipes"
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARDS)
    write_jsonl(folder / "sums.jsonl", SUMS)
    (folder / "rewarded.toml").write_text(SECTION.replace("grpo.toml", "../grpo.toml"))
    return workplace


def expected_reward(sample: dict[str, str], answer: str) -> float:
    text = sample["response"]
    return sum(letter in "02468" for letter in text) / 4 + 0.5 * (text[:1] == answer[:1])


def test_rewards_are_those_of_the_functions_also_where_a_run_is_resumed(place: Workplace) -> None:
    whole = place.train("recipes/rewarded.toml", "run.name=whole")
    answers = {row["prompt"]: row["answer"] for row in SUMS}
    samples = [row for file in sorted((whole / "rollouts").glob("step-*")) for row in parquet.read_table(file).to_pylist()]
    assert len(samples) == 2 * 4 * 4
    for sample in samples:
        assert sample["reward"] == pytest.approx(expected_reward(sample, answers[sample["prompt"]]))
        assert sample["success"] == (sample["response"] == answers[sample["prompt"]])
    first = read_metrics(whole)[1]
    assert first["environment/length"] == pytest.approx(sum(len(sample["response"]) for sample in samples[:16]) / 16)
    assert {"environment/even", "environment/begins"} <= first.keys()
    place.train("recipes/rewarded.toml", "run.num_steps=1")
    resumed = place.train("recipes/rewarded.toml", "--resume")
    assert read_metrics(resumed)[-1] == read_metrics(whole)[-1]
    assert not [child for child in psutil.Process().children() if child.cmdline()[-1:] == ["rewards"]]


PENALTIES = """
def bonus(completion):
    return 0.1 if len(completion) % 2 else 0.0

def second(completion):
    return 0.2 if len(completion) % 2 else 0.0

def penalty(completion):
    return -0.3 if len(completion) % 2 else 0.0
"""
"""Functions whose sum is 0 or, by rounding, 5.6e-17."""


def cancelling(place: Workplace) -> Path:
    """The recipe of such functions."""
    (place.folder / "recipes" / "rewards.py").write_text(PENALTIES)
    parts = json.dumps([f"rewards.py:{name}" for name in ("bonus", "second", "penalty")])
    section = SECTION.replace("grpo.toml", "../grpo.toml").replace("weights = {begins = 0.5}\n", "")
    recipe = place.folder / "recipes" / "cancelling.toml"
    recipe.write_text(section.replace('["rewards.py:even", "rewards.py:begins"]', parts))
    return recipe


@pytest.mark.wide(keep=["grpo"])
@pytest.mark.parametrize("algorithm", ["grpo", "maxrl", "reinforce_pp_baseline", "rloo"])
def test_parts_of_rewards_that_cancel_teach_nothing(place: Workplace, algorithm: str) -> None:
    options = ("algorithm.reinforce_pp_baseline.kl_coefficient=0.0",) if algorithm == "reinforce_pp_baseline" else ()
    result = place.rlcore("train", cancelling(place), f"algorithm.name={algorithm}", *options)
    assert result.exit_code == 0, result.output
    samples = parquet.read_table(place.run("run") / "rollouts" / "step-000001.parquet").to_pylist()
    assert len({sample["reward"] for sample in samples}) == 2, "by rounding"
    for line in read_metrics(place.run("run"))[1:]:
        assert (line["updates"], line["zero_advantage_groups"]) == (0, 1)


def test_they_teach_where_each_part_is_compared(place: Workplace) -> None:
    """No group is replaced for its equal sums, which all have."""
    weights = "algorithm.gdpo.reward_weights={bonus = 3.0}"
    refills = ("rollout.dynamic_sampling=true", "rollout.max_refill_ratio=2")
    result = place.rlcore("train", cancelling(place), "algorithm.name=gdpo", weights, *refills)
    assert result.exit_code == 0, result.output
    for line in read_metrics(place.run("run"))[1:]:
        assert line["updates"] > 0
        assert abs(line["reward_mean"]) < 1e-12
        assert line["zero_advantage_groups"] == 0


@pytest.mark.wide  # the driver calls the functions, and test_cluster.py trains with workers
def test_workers_on_ray_get_the_same_rewards(place: Workplace) -> None:
    alone = place.train("recipes/rewarded.toml", "run.name=alone", "run.num_steps=1")
    cluster = place.train("recipes/rewarded.toml", "run.name=cluster", "run.num_steps=1", "cluster.gpus_per_node=1")
    for one, other in zip(read_metrics(alone), read_metrics(cluster), strict=True):
        assert one == {name: close(value) for name, value in other.items()}


def test_check_says_what_is_wrong_with_functions_and_rows(place: Workplace) -> None:
    def check(*overrides: str) -> str:
        return expect_failure(place.rlcore("check", "recipes/rewarded.toml", *overrides), *code)

    code: tuple[int, str] = (2, "environment.function.path")
    assert "gone.py" in check("environment.function.path=gone.py:f")
    assert "AttributeError" in check("environment.function.path=recipes/rewards.py:odd")
    code = (4, "'begins' takes answer")
    write_jsonl(place.folder / "questions.jsonl", [{"prompt": "1+1="}])
    check("data.train.path=questions.jsonl")


def test_a_function_that_fails_ends_the_run_or_costs_its_samples(place: Workplace) -> None:
    lines = ("def begins(completion):", "    if len(completion) % 2: raise ValueError('odd')", "    return len(completion)")
    (place.folder / "failing.py").write_text("\n".join(lines))
    wrong = "environment.function.path=failing.py:begins"
    result = place.rlcore("train", "recipes/rewarded.toml", wrong)
    assert result.exit_code == 8
    assert "environment 'function'" in result.stderr
    assert "'begins' raised ValueError at failing.py:2: odd" in result.stderr
    masks = ("rollout.on_environment_error=mask", "rollout.max_failed_fraction=1.0", "run.name=masked")
    assert place.rlcore("train", "recipes/rewarded.toml", wrong, *masks).exit_code == 0
    run = place.run("masked")
    samples = parquet.read_table(run / "rollouts" / "step-000001.parquet").to_pylist()
    assert {len(sample["response"]) % 2 for sample in samples if sample["valid"]} == {0}
    assert read_metrics(run)[1]["environment/failed"] == sum(not sample["valid"] for sample in samples)


def test_the_recipe_of_the_run_directory_is_the_same_run(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    run = place.train("recipes/rewarded.toml", "run.num_steps=1")
    (place.folder / "elsewhere").mkdir()
    monkeypatch.chdir(place.folder / "elsewhere")
    result = place.rlcore("eval", run / "recipe.toml", "--checkpoint", run / "checkpoints" / "step-000001", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["eval/pass@1"] >= 0.0
    assert Path.cwd().name == "elsewhere"

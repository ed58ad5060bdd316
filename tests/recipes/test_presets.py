"""Every preset of GRPO trains without further keys, and so do objectives without one, on what transformers samples."""

import math
from importlib.metadata import entry_points
from pathlib import Path

import pandas
import pytest

from rlcore.run.plan.prepare import prepare
from rlcore.run.report.progress import Progress
from rlcore.run.train import train
from rlcore_torchkit.testing.models import make_model

RECIPE = """\
[model]
path = "{model}"

[run]
num_steps = 2

[algorithm]
name = "{name}"

[environment]
name = "arithmetic"

[environment.arithmetic]
max_operand = 9
num_train = 32
num_evaluation = 8
partial_credit = 0.5

[rollout]
samples_per_prompt = 4
max_prompt_tokens = 4
max_response_tokens = 3

[training]
prompts_per_step = 6

[optimizer]
learning_rate = 0.01

[checkpoint]
at_end = false

[logging]
rollouts_every_n_steps = 1

[sinks]
names = []
"""
PRESETS = sorted(entry.name for entry in entry_points(group="rlcore.algorithms") if entry.module == "rlcore_grpo.presets")
OWN = {
    "dapo": ("length_penalty", "async/groups_refilled"),
    "gdpo": ("reward/answer", "reward/well_formed"),
    "reinforce_pp": ("reward_kl",),
    "reinforce_pp_baseline": ("kl",),
}
"""Metrics that only the preset's own defaults bring about."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("presets") / "model"
    return make_model(directory, hidden_size=16, num_layers=1, num_heads=2, alphabet="0123456789+=", max_length=16)


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_name_is_a_whole_algorithm(name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(model=model, name=name))
    train(prepare(recipe), resume=False, progress=Progress())
    run = tmp_path / "runs" / "run"
    steps = pandas.read_json(run / "metrics.jsonl", lines=True)
    assert steps["updates"].tolist() == [1, 1]
    assert steps["weight_version"].tolist() == [1, 2]
    assert all(map(math.isfinite, steps["loss"]))
    assert (steps["grad_norm"] > 0).all()
    assert (steps["advantage_max"] > 0).all()
    assert set(OWN.get(name, ())) <= set(steps)
    if name == "dapo":
        rollouts = [pandas.read_parquet(path) for path in sorted((run / "rollouts").glob("step-*.parquet"))]
        assert all((table.groupby("group")["reward"].nunique() > 1).all() for table in rollouts)
        assert steps["async/groups_refilled"].sum() > 0
    if name == "reinforce_pp":  # the policy is the reference in the first step, and no longer in the second
        first, second = steps["reward_kl"]
        assert abs(first) < 1e-5 < abs(second)


@pytest.mark.parametrize(
    ("options", "figure"),
    [
        ('objective = "clip_cov"\ncovariance_share = 0.1\ncovariance_minimum = 0.01', "high_covariance"),
        ('objective = "kl_cov"\ncovariance_share = 0.1', "high_covariance"),
        (
            'objective = "policy_gradient"\nimportance_correction = "sequence"\nprevious_logprobs = "trainer"',
            "importance_weight",
        ),
    ],
)
def test_an_objective_without_a_preset_trains(
    options: str, figure: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.toml"
    text = RECIPE.format(model=model, name="grpo").replace("[training]\n", "[training]\nminibatches_per_step = 2\n")
    recipe.write_text(f"{text}\n[algorithm.grpo]\n{options}\n")
    train(prepare(recipe), resume=False, progress=Progress())
    steps = pandas.read_json(tmp_path / "runs" / "run" / "metrics.jsonl", lines=True)
    assert (steps["grad_norm"] > 0).all()
    assert (steps[figure] > 0).all()

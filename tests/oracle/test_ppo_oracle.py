"""Whole runs of PPO against an independent computation in float64: figures of every step, and all weights of policy and critic.

The first step trains the critic alone, the others both; each makes two updates.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from rlcore.cli.main import cli

from .recorded import read_samples
from .reference_grpo import Options
from .reference_ppo import PpoOptions, PpoRun

RECIPE = """
[run]
num_steps = 3
seed = 5
device = "cpu"
[model]
path = "{model}"
dtype = "float32"
[algorithm]
name = "ppo"
[algorithm.ppo]
gamma = 0.97
gae_lambda = 0.9
bootstrap_truncated = true
previous_logprobs = "trainer"
kl_coefficient = 0.1
entropy_coefficient = 0.02
clip_low = 0.1
clip_high = 0.15
value_clip = 0.02
[critic]
learning_rate = 0.02
max_grad_norm = 0.5
warmup_steps = 1
export = true
[environment]
name = "arithmetic"
[environment.arithmetic]
max_operand = 99
num_train = 60
num_evaluation = 8
partial_credit = 0.5
[generator]
name = "transformers"
[rollout]
samples_per_prompt = 3
max_prompt_tokens = 8
max_response_tokens = 4
temperature = 0.8
[training]
prompts_per_step = 8
minibatches_per_step = 2
max_tokens_per_microbatch = 40
[optimizer]
learning_rate = 0.05
betas = [0.8, 0.95]
eps = 2e-2
weight_decay = 0.1
[schedule]
warmup_steps = 1
decay = "linear"
min_learning_rate_ratio = 0.1
[logging]
rollouts_every_n_steps = 1
[sinks]
names = []
[checkpoint]
at_end = false
export = "hf"
"""
OPTIONS = PpoOptions(
    policy=Options(
        seed=5,
        num_steps=3,
        minibatches_per_step=2,
        max_staleness=0,
        temperature=0.8,
        top_p=1.0,
        masked=False,
        rescores=False,
        previous="trainer",
        clip_low=0.1,
        clip_high=0.15,
        kl_coefficient=0.0,
        importance_maximum=2.0,
        advantage_epsilon=0.0,
        loss_normalisation="token",
        learning_rate=0.05,
        betas=(0.8, 0.95),
        eps=2e-2,
        weight_decay=0.1,
        max_grad_norm=1.0,
        warmup_steps=1,
        min_learning_rate_ratio=0.1,
    ),
    critic_learning_rate=0.02,
    critic_max_grad_norm=0.5,
    warmup_steps=1,
    gamma=0.97,
    gae_lambda=0.9,
    bootstrap_truncated=True,
    value_clip=0.02,
    kl_coefficient=0.1,
    entropy_coefficient=0.02,
)


@pytest.mark.wide(keep=["fsdp2"])
@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_policy_and_critic_are_those_of_the_formulas(trainer: str, model: Path, in_folder: Path) -> None:
    assert_right(in_folder, model, f"trainer.name={trainer}")


@pytest.mark.wide  # tests/ray_execution trains critics on two ranks, test_values.py of each trainer holds them to a formula
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_so_are_those_of_two_ranks(trainer: str, model: Path, in_folder: Path) -> None:
    assert_right(in_folder, model, f"trainer.name={trainer}", "cluster.gpus_per_node=2")


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_right(tmp_path: Path, model: Path, *overrides: str) -> None:
    (tmp_path / "ppo.toml").write_text(RECIPE.format(model=model))
    result = CliRunner().invoke(cli, ["train", "ppo.toml", *overrides])
    assert result.exit_code == 0, f"{result.stdout}{result.stderr}"
    directory = tmp_path / "runs" / "run"
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    samples = read_samples(directory)
    assert {own.is_cut for step in samples for own in step} == {True, False}
    assert len({own.reward for step in samples for own in step}) > 1
    reference = PpoRun(model, OPTIONS)
    expected = [reference.step(number, own) for number, own in enumerate(samples, start=1)]
    assert [line["updates"] for line in lines] == [0, 2, 2]
    for line, figures in zip(lines, expected, strict=True):
        assert {name: line[name] for name in figures} == pytest.approx(figures, rel=2e-4, abs=2e-5)
    assert max(line["critic/clip_fraction"] for line in lines) > 0
    assert max(line.get("clip_fraction", 0) for line in lines) > 0
    _assert_equal(load_file(directory / "model" / "model.safetensors"), dict(reference.policy.model.named_parameters()))
    _assert_equal(load_file(directory / "critic" / "model.safetensors"), reference.critic.named())
    told = AutoModelForSequenceClassification.from_pretrained(directory / "critic", num_labels=1)
    assert told.score.weight.any()


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every element, but for the rounding of float32 over six updates."""
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight.detach().float(), rtol=1e-4, atol=2e-5, err_msg=name)

"""Whole runs of episodes with several turns against an independent computation in float64."""

import json
from pathlib import Path

import numpy as np
import pandas
import pytest
from attrs import evolve
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

from rlcore.cli.main import cli

from .cases import RECIPE as GRPO_RECIPE
from .cases import Case
from .recorded import Sample, read_samples
from .reference_turns import REWARD, GrpoOfParts, GrpoOfTurns, Judge, PpoOfParts, PpoOfTurns, turns_of
from .test_ppo_oracle import OPTIONS as PPO
from .test_ppo_oracle import RECIPE as PPO_RECIPE

TURNS = (
    "environment.name=turns",
    "rollout.max_turns=3",
    "rollout.max_turn_tokens=8",
    "rollout.max_response_tokens=26",
    "training.max_tokens_per_microbatch=50",
    "training.minibatches_per_step=2",
)


def train(folder: Path, recipe: str, *overrides: str) -> Path:
    """The run directory of a recipe whose environment is the one of turns."""
    before, _, behind = recipe.partition("[environment.arithmetic]")
    (folder / "turns.toml").write_text(before + behind[behind.index("[generator]") :])
    result = CliRunner().invoke(cli, ["train", "turns.toml", *TURNS, *overrides])
    assert result.exit_code == 0, f"{result.stdout}{result.stderr}"
    return folder / "runs" / "run"


def lines_of(run: Path) -> list[dict[str, float]]:
    return [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["step"]]


def assert_weights(file: Path, model: nn.Module) -> None:
    """But for the rounding of float32 over six updates."""
    found = load_file(file)
    for name, weight in model.named_parameters():
        np.testing.assert_allclose(found[name], weight.detach().float(), rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.wide(keep=["1-megatron"])
@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_turns_are_compared_where_cut_samples_are_masked_and_groups_replaced(
    trainer: str, staleness: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(
        tmp_path,
        GRPO_RECIPE.format(model=model),
        f"trainer.name={trainer}",
        "algorithm.grpo.advantage_per=turn",
        "algorithm.grpo.previous_logprobs=trainer",
        "rollout.on_truncation=mask",
        "rollout.dynamic_sampling=true",
        "rollout.max_refill_ratio=30",
        *([f"async.max_staleness={staleness}", "generator.transformers.max_batch_size=12"] if staleness else []),
    )
    case = Case(trainer="fsdp2", updates=2, previous="trainer", kl=False, cut=False)
    reference = GrpoOfTurns(model, evolve(case.options, max_grad_norm=1.0))
    steps, lines = read_samples(run), lines_of(run)
    assert len(steps) == len(lines) == 3
    for number, (samples, line) in enumerate(zip(steps, lines, strict=True), start=1):
        assert reference.distance(samples) < 1e-4
        assert_masked(samples, reference.judge)
        figures = reference.step(number, samples)
        assert {name: line[name] for name in figures} == pytest.approx(figures, rel=2e-4, abs=2e-5)
        assert figures["updates"] == 2, "each group has something to teach"
    assert sum(line["async/groups_refilled"] for line in lines) > 0
    assert max(len(turns_of(own)) for samples in steps for own in samples if own.valid) > 1
    assert_weights(run / "model" / "model.safetensors", reference.policy.model)


def assert_masked(samples: list[Sample], judge: Judge) -> None:
    """Samples are masked where a limit cut them off, and nowhere else; in each group what the others earn from some turn on
    differs."""
    cut = [judge.is_cut(own) for own in samples]
    assert [own.valid for own in samples] == [not one for one in cut]
    assert 0 < sum(cut) < len(cut)
    for own in samples:
        assert own.loss_mask.tolist() == ((own.weight_versions >= 0) & own.valid).tolist()
        assert own.reward == pytest.approx(sum(judge.rewards(own)) if own.valid else 0.0)
    for group in {own.group for own in samples}:
        earned = [judge.rewards(own) for own in samples if own.group == group and own.valid]
        assert any(
            len({round(sum(one[turn:]), 6) for one in earned if turn < len(one)}) > 1 for turn in range(max(map(len, earned)))
        )


def train_on_parts(folder: Path, recipe: str, *overrides: str) -> Path:
    """The run directory of a recipe whose answers are rewarded in parts."""
    before, _, behind = recipe.partition("[environment.arithmetic]")
    source = f"{before}[environment.function]\npath = 'parts.py:score'\n{behind[behind.index('[generator]') :]}"
    rows = [{"prompt": f"{number}+{number}="} for number in range(1, 9)]
    (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "parts.toml").write_text(source.replace('name = "arithmetic"', 'name = "function"'))
    (folder / "parts.py").write_text(REWARD)
    data = ("data.train.source=jsonl", "data.train.path=prompts.jsonl", "rollout.max_response_tokens=12")
    result = CliRunner().invoke(cli, ["train", "parts.toml", *data, *overrides])
    assert result.exit_code == 0, f"{result.stdout}{result.stderr}"
    return folder / "runs" / "run"


@pytest.mark.usefixtures("recorder")
def test_parts_of_an_answer_are_compared(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    process = ("algorithm.grpo.advantage_per=process", "algorithm.grpo.previous_logprobs=trainer")
    run = train_on_parts(tmp_path, GRPO_RECIPE.format(model=model), *process, "training.minibatches_per_step=2")
    case = Case(trainer="fsdp2", updates=2, previous="trainer", kl=False, cut=False)
    reference = GrpoOfParts(model, evolve(case.options, max_grad_norm=1.0))
    steps, lines = read_samples(run), lines_of(run)
    assert max(len(reference.parts.of(own)) for samples in steps for own in samples) > 2
    for number, (samples, line) in enumerate(zip(steps, lines, strict=True), start=1):
        for own in samples:
            assert own.reward == pytest.approx(sum(reward for _, _, reward in reference.parts.of(own)))
        figures = reference.step(number, samples)
        assert {name: line[name] for name in figures} == pytest.approx(figures, rel=2e-4, abs=2e-5)
    assert_weights(run / "model" / "model.safetensors", reference.policy.model)


@pytest.mark.usefixtures("recorder")
def test_a_critic_learns_what_parts_earn(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = train_on_parts(tmp_path, PPO_RECIPE.format(model=model), "algorithm.ppo.bootstrap_truncated=false")
    reference = PpoOfParts(model, evolve(PPO, bootstrap_truncated=False))
    for number, (samples, line) in enumerate(zip(read_samples(run), lines_of(run), strict=True), start=1):
        figures = reference.step(number, samples)
        assert {name: line[name] for name in figures} == pytest.approx(figures, rel=2e-4, abs=2e-5)


@pytest.mark.usefixtures("recorder")
def test_a_group_of_equal_components_makes_no_update(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two, each with an update of its own."""
    monkeypatch.chdir(tmp_path)
    overrides = ("training.minibatches_per_step=6", "rollout.samples_per_prompt=2", "rollout.max_turn_tokens=4")
    run = train(tmp_path, GRPO_RECIPE.replace("grpo", "gdpo").format(model=model), *overrides)
    expected = []
    for path in sorted((run / "rollouts").glob("step-*.parquet")):
        groups = pandas.read_parquet(path).groupby("group")[["reward/ones", "reward/twos"]]
        expected.append((groups.nunique() > 1).any(axis=1).sum())
    assert [line["updates"] for line in lines_of(run)] == expected
    assert 0 < sum(expected) < 6 * len(expected)


@pytest.mark.usefixtures("recorder")
def test_a_group_whose_turns_differ_stays_though_its_sums_are_equal(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of two, each with an update of its own: all of them teach something."""
    monkeypatch.chdir(tmp_path)
    groups_of_two = ("training.minibatches_per_step=6", "rollout.samples_per_prompt=2", "run.num_steps=6")
    refills = ("rollout.dynamic_sampling=true", "rollout.max_refill_ratio=30")
    run = train(tmp_path, GRPO_RECIPE.format(model=model), "algorithm.grpo.advantage_per=turn", *groups_of_two, *refills)
    lines, num_equal_sums = lines_of(run), 0
    for path in sorted((run / "rollouts").glob("step-*.parquet")):
        num_equal_sums += (pandas.read_parquet(path).groupby("group")["reward"].nunique() == 1).sum()
    assert [line["updates"] for line in lines] == [6.0] * 6
    assert sum(line["async/groups_refilled"] for line in lines) > 0
    assert num_equal_sums > 0


@pytest.mark.wide(keep=["fsdp2"])
@pytest.mark.usefixtures("recorder")
@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_a_critic_learns_what_turns_earn(trainer: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ("algorithm.ppo.bootstrap_truncated=false", f"trainer.name={trainer}")
    run = train(tmp_path, PPO_RECIPE.format(model=model), *overrides)
    steps, lines = read_samples(run), lines_of(run)
    assert {len(turns_of(own)) for samples in steps for own in samples} == {1, 2, 3}
    reference = PpoOfTurns(model, evolve(PPO, bootstrap_truncated=False))
    for number, (samples, line) in enumerate(zip(steps, lines, strict=True), start=1):
        figures = reference.step(number, samples)
        assert {name: line[name] for name in figures} == pytest.approx(figures, rel=2e-4, abs=2e-5)
    assert_weights(run / "model" / "model.safetensors", reference.policy.model)
    critic = load_file(run / "critic" / "model.safetensors")
    for name, weight in reference.critic.named().items():
        np.testing.assert_allclose(critic[name], weight.detach().float(), rtol=1e-4, atol=2e-5, err_msg=name)

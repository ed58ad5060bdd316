"""The main job on small models: a warm start, GRPO from it, and what the two leave behind."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from attrs import frozen
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlcore_torchkit.testing.models import make_model

from .system_support import DIGITS, Workplace, checkpoints, close, read_metrics, write_jsonl  # type: ignore[import-not-found]

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(a + b)} for a in range(5) for b in range(5)]
SMALL_SUMS = (
    "environment.arithmetic.partial_credit=0.0",
    "data.train.source=jsonl",
    "data.train.path=sums.jsonl",
    "data.evaluation.source=jsonl",
    "data.evaluation.path=sums.jsonl",
    "rollout.max_response_tokens=2",
)

ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe", "llama")
"""Answers of one digit; what is measured is what is trained on, since so little is learned by heart."""
EVALUATION = ("evaluation.samples_per_prompt=16", "evaluation.temperature=1.0")


@frozen
class Story:
    """A warm start, and GRPO from the model that it exported."""

    workplace: Workplace
    sft: Path
    grpo: Path
    grpo_recipe: Path


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Story:
    workplace = Workplace.make(tmp_path_factory.mktemp("story"), model)
    write_jsonl(workplace.folder / "sums.jsonl", SUMS)
    with contextlib.chdir(workplace.folder):
        options = ("checkpoint.export=hf", 'sinks.names=["curve"]')
        sft = workplace.train("sft.toml", *SMALL_SUMS, *options, "run.num_steps=15", "training.prompts_per_step=25")
        (workplace.folder / "second.toml").write_text(
            'extends = ["grpo.toml"]\n[run]\nname = "second"\nnum_steps = 30\n[model]\npath = "runs/sft/model"\n'
            "[training]\nprompts_per_step = 25\n[optimizer]\nlearning_rate = 3e-3\n"
        )
        grpo = workplace.train("second.toml", *SMALL_SUMS, *options, *EVALUATION, "rollout.samples_per_prompt=8")
    return Story(workplace, sft, grpo, workplace.folder / "second.toml")


def test_demonstrations_teach(story: Story) -> None:
    losses = [record["loss"] for record in read_metrics(story.sft)]
    assert losses[0] > 2.0, "of 17 characters none is likelier than another"
    assert losses[-1] < 0.5 * losses[0]


def test_rewards_teach(story: Story) -> None:
    records = read_metrics(story.grpo)
    rewards = [record["reward_mean"] for record in records[1:]]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.25
    assert all(record["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4) for record in records[1:] if record["updates"])
    assert (story.grpo / "curve.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((story.grpo / "summary.json").read_text())
    assert summary["accuracy_before"] == records[0]["eval/pass@1"]
    assert summary["accuracy_after"] == records[-1]["eval/pass@1"]
    assert checkpoints(story.grpo) == ["step-000028", "step-000030"]


def test_rollouts_are_a_table(story: Story) -> None:
    samples = pandas.read_parquet(story.grpo / "rollouts" / "step-000030.parquet")
    assert len(samples) == 25 * 8
    version = int(read_metrics(story.grpo)[29]["weight_version"])
    tokenizer = AutoTokenizer.from_pretrained(story.sft / "model")
    for _, sample in samples.iterrows():
        left, right = sample["prompt"].removesuffix("=").split("+")
        assert sample["reward"] == float(sample["response"] == str(int(left) + int(right))) == float(sample["success"])
        assert tokenizer.decode(sample["tokens"][~sample["loss_mask"]]) == sample["prompt"]
        assert tokenizer.decode(sample["tokens"][sample["loss_mask"]], skip_special_tokens=True) == sample["response"]
        assert set(sample["weight_versions"][sample["loss_mask"]]) == {version}


def test_the_exported_model_is_what_was_trained(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own forward pass on it gives the log-probabilities that trainer and generator work with."""
    monkeypatch.chdir(story.workplace.folder)
    options = (f"model.path={story.grpo / 'model'}", "run.num_steps=1", "run.name=again", "logging.rollouts_every_n_steps=1")
    arguments = (*SMALL_SUMS, *options, "rollout.temperature=2.0", "evaluation.at_start=false", "checkpoint.at_end=false")
    again = story.workplace.train("second.toml", *arguments)
    assert read_metrics(again)[0]["token_mult_prob_error"] == close(1.0)
    policy = AutoModelForCausalLM.from_pretrained(story.grpo / "model", dtype=torch.float32)
    samples = pandas.read_parquet(again / "rollouts" / "step-000001.parquet")
    for _, sample in samples.iterrows():
        tokens = torch.tensor(sample["tokens"].astype(np.int64))
        with torch.no_grad():
            logits = policy(tokens[None]).logits[0, :-1] / 2.0
        logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0].numpy()
        mask = sample["loss_mask"][1:]
        np.testing.assert_allclose(sample["generation_logprobs"][1:][mask], logprobs[mask], atol=1e-4)


def test_eval_measures_the_export_and_the_checkpoint_alike(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(story.workplace.folder)
    last = read_metrics(story.grpo)[-1]
    expected = {name: value for name, value in last.items() if name.startswith("eval/")}
    places = (("--model", story.grpo / "model"), ("--checkpoint", story.grpo / "checkpoints" / "step-000030"))
    for option, path in places:
        result = story.workplace.rlcore("eval", "second.toml", *SMALL_SUMS, *EVALUATION, option, path, "--json")
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        bounds = [found.pop(f"eval/pass@1_{end}") for end in ("low", "high")]
        assert bounds[0] <= expected["eval/pass@1"] <= bounds[1]
        assert found == pytest.approx(expected)
    # A recipe that measures nothing while it trains can be measured all the same.
    result = story.workplace.rlcore("eval", "sft.toml", *SMALL_SUMS, *EVALUATION, *map(str, places[0]), "--json")
    found = json.loads(result.stdout)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    untrained = story.workplace.rlcore("eval", "grpo.toml", *SMALL_SUMS, *EVALUATION, "--json")
    assert json.loads(untrained.stdout)["eval/pass@1"] < expected["eval/pass@1"] - 0.5


def test_the_resolved_recipe_runs_again_to_the_same_metrics(story: Story) -> None:
    result = story.workplace.rlcore(
        "train", story.grpo / "recipe.toml", "--name", "copy", "--directory", story.workplace.folder
    )
    assert result.exit_code == 0, result.stderr
    assert read_metrics(story.workplace.folder / "copy") == read_metrics(story.grpo)
    assert (story.workplace.folder / "copy" / "recipe.toml").read_text() == (
        (story.grpo / "recipe.toml")
        .read_text()
        .replace('name = "second"', 'name = "copy"')
        .replace('directory = "runs"', f'directory = "{story.workplace.folder}"')
    )


def test_overrides_win_over_the_recipe_and_it_over_what_it_extends(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(story.workplace.folder)
    result = story.workplace.rlcore("config", "second.toml", "training.prompts_per_step=7", "run.seed=3", "run.seed=4")
    import tomllib

    resolved = tomllib.loads(result.stdout)
    assert resolved["training"]["prompts_per_step"] == 7
    assert resolved["run"] == {"directory": "runs", "name": "second", "seed": 4, "num_steps": 30, "device": "auto"}
    assert resolved["rollout"]["samples_per_prompt"] == 4
    assert resolved["optimizer"]["learning_rate"] == 3e-3
    assert resolved["model"]["path"] == str(story.workplace.folder / "runs" / "sft" / "model")


def test_seeds_decide(workplace: Workplace) -> None:
    first, again, other = (
        workplace.train("grpo.toml", f"run.name={name}", f"run.seed={seed}") for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    )
    assert read_metrics(first) == read_metrics(again) != read_metrics(other)


@pytest.mark.wide(sample=2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_trains(workplace: Workplace, architecture: str) -> None:
    path = make_model(workplace.folder / "model", architecture, alphabet=DIGITS, max_length=64, hidden_size=16, tied=False)
    options = (
        f"model.path={path}",
        "algorithm.grpo.kl_coefficient=0.05",
        "training.minibatches_per_step=2",
        "checkpoint.export=hf",
    )
    run = workplace.train("grpo.toml", *options, 'sinks.names=["tensorboard"]')
    records = read_metrics(run)
    assert all(record["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3) for record in records[1:] if record["updates"])
    assert any(record["kl"] > 0 for record in records[1:] if record["updates"])
    exported = AutoModelForCausalLM.from_pretrained(run / "model")
    assert exported.config.architectures == AutoModelForCausalLM.from_pretrained(path).config.architectures
    assert list((run / "tensorboard").iterdir())

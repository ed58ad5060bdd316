"""The recipes of self-distillation: the facts that they teach, and steps whose losses transformers computes in float64."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlcore

RECIPES = Path(__file__).parents[2] / "recipes"
ONE_UPDATE = ("schedule.warmup_steps=0", "schedule.decay=constant", "logging.rollouts_every_n_steps=1", "sinks.names=[]")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the facts and of the model."""
    folder = tmp_path_factory.mktemp("facts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_model.py", str(folder)])
        runpy.run_path(str(RECIPES / "facts" / "make_model.py"), run_name="__main__")
    return folder


def trained(facts: Path, recipe: str, directory: Path, *overrides: str) -> Any:
    data = f"data.train.path={facts / 'facts.jsonl'}"
    model = f"model.path={facts / 'warm-start' / 'model'}"
    return rlcore.train(RECIPES / recipe, model, data, f"run.directory={directory}", *overrides, progress="silent")


def steps_of(run: Any) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def recalled(model: Path, facts: Path) -> float:
    """The share of facts whose digit is the likeliest answer."""
    rows = [json.loads(line) for line in (facts / "facts.jsonl").read_text().splitlines()]
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    prompts = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in rows])
    with torch.no_grad():
        best = policy(prompts).logits[:, -1].argmax(-1)
    return float(np.mean([tokenizer.decode([one]) == row["privileged_context"] for one, row in zip(best, rows, strict=True)]))


def divergence(run: Any, step: int, student: Path, teacher: Path, facts: Path) -> float:
    """Mean over the sampled tokens of a step of log student(token | "a=") - log teacher(token | "a=3;a=")."""
    rows = [json.loads(line) for line in (facts / "facts.jsonl").read_text().splitlines()]
    hint_of = {row["prompt"]: f"{row['prompt']}{row['privileged_context']};" for row in rows}
    tokenizer = AutoTokenizer.from_pretrained(student)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (student, teacher)]
    samples, gaps = pandas.read_parquet(run.path / "rollouts" / f"step-{step:06d}.parquet"), list[float]()
    for tokens, mask in zip(samples.tokens, samples.loss_mask, strict=True):
        answer = torch.tensor(tokens[mask].tolist())
        own = tokens[~mask].tolist()
        found = []
        for model, prompt in zip(models, (own, tokenizer(hint_of[tokenizer.decode(own)])["input_ids"] + own), strict=True):
            with torch.no_grad():
                logprobs = model(torch.tensor([[*prompt, *answer.tolist()]])).logits[0].log_softmax(-1)
            found.append(logprobs[len(prompt) - 1 : -1].gather(1, answer[:, None])[:, 0])
        gaps += (found[0] - found[1]).tolist()
    return float(np.mean(gaps))


def test_the_policy_learns_facts_from_itself(facts: Path, tmp_path: Path) -> None:
    run = trained(facts, "facts-sdft.toml", tmp_path, "run.num_steps=25", "sinks.names=[]")
    assert recalled(facts / "warm-start" / "model", facts) < 0.5 < 0.8 < recalled(run.path / "model", facts)


@pytest.mark.wide(keep=["policy"])
@pytest.mark.parametrize("teacher", ["policy", "reference"])
def test_the_loss_of_each_step_is_the_divergence_from_the_teacher_of_that_step(
    facts: Path, tmp_path: Path, teacher: str
) -> None:
    options = (*ONE_UPDATE, f"algorithm.sdft.teacher={teacher}", "rollout.samples_per_prompt=2")
    once = trained(facts, "facts-sdft.toml", tmp_path / "once", *options, "run.num_steps=1")
    twice = trained(facts, "facts-sdft.toml", tmp_path / "twice", *options, "run.num_steps=2")
    start, then = facts / "warm-start" / "model", once.path / "model"
    of_teacher = {"policy": (start, then), "reference": (start, start)}[teacher]
    for step, (student, other) in enumerate(zip((start, then), of_teacher, strict=True), start=1):
        expected = divergence(twice, step, student, other, facts)
        assert steps_of(twice)[step - 1]["reverse_kl"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.wide
def test_right_answers_of_a_group_teach_the_others(facts: Path, tmp_path: Path) -> None:
    run = trained(facts, "facts-sdpo.toml", tmp_path, "run.num_steps=12", "sinks.names=[]")
    steps = steps_of(run)
    assert steps[0]["success_group_fraction"] > 0.5
    assert steps[-1]["reward_mean"] > 2 * steps[0]["reward_mean"]

"""The recipe of generalised knowledge distillation: its models and answers, and steps of it."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlcore

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the student, the teacher and its answers."""
    folder = tmp_path_factory.mktemp("gkd")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_school.py", str(folder)])
        runpy.run_path(str(RECIPES / "gkd" / "make_school.py"), run_name="__main__")
    return folder


def divergence(student: Path, teacher: Path) -> float:
    """The Jensen-Shannon divergence of the first token of the answer to each prompt, in nats, in float64."""
    encode = AutoTokenizer.from_pretrained(teacher)
    prompts = torch.tensor([encode(f"{a}+{b}=")["input_ids"] for a in range(4) for b in range(4)])
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (student, teacher)]
    with torch.no_grad():
        one, other = (model(prompts).logits[:, -1].log_softmax(-1) for model in models)
    mean = torch.logaddexp(one, other) - torch.tensor(2.0).log()
    return float(sum((part.exp() * (part - mean)).sum(-1).mean() / 2 for part in (one, other)))


def test_the_student_comes_closer_to_its_teacher(school: Path, tmp_path: Path) -> None:
    overrides = [
        f"model.path={school / 'student'}",
        f"reference.path={school / 'teacher'}",
        f"data.train.path={school / 'answers.jsonl'}",
        f"run.directory={tmp_path}",
        "run.num_steps=25",
    ]
    run = rlcore.train(RECIPES / "gkd.toml", *overrides, progress="silent")
    steps = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert all(step["updates"] == 1 for step in steps)
    assert steps[0]["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-3), "the samples alone are compared"
    before, after = (divergence(path, school / "teacher") for path in (school / "student", run.path / "model"))
    assert after < before / 2

"""KTO as a user runs it: the weights of an independent computation under both trainers, resumption, bad labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from .system_support import Workplace, close, expect_failure, read_metrics, write_jsonl  # type: ignore[import-not-found]

ROWS = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b if (a + b) % 3 else a * b), "label": bool((a + b) % 3)}
    for a in range(3, 9)
    for b in (2, 5)
]
HELD_OUT = [{"prompt": f"{a}-1=", "completion": str(a - 1), "label": a > 3} for a in (2, 5, 8)]
MEASURED = ("data.evaluation.source=jsonl", "data.evaluation.path=held-out.jsonl")
BETA, DESIRABLE, UNDESIRABLE = 0.5, 1.2, 0.8
RECIPE = """
[run]
name = "kto"
num_steps = 3
[model]
path = "{model}"
[algorithm]
name = "kto"
[algorithm.kto]
beta = 0.5
desirable_weight = 1.2
undesirable_weight = 0.8
[data.train]
source = "jsonl"
path = "labelled.jsonl"
shuffle = false
[rollout]
max_prompt_tokens = 8
max_response_tokens = 4
[training]
prompts_per_step = 4
max_tokens_per_microbatch = 14
[optimizer]
learning_rate = 1e-2
eps = 1e-3
[checkpoint]
export = "hf"
[sinks]
names = []
"""


@pytest.fixture
def place(workplace: Workplace, model: Path) -> Workplace:
    """A workplace with the recipe kto.toml and its rows."""
    (workplace.folder / "kto.toml").write_text(RECIPE.format(model=model))
    write_jsonl(workplace.folder / "labelled.jsonl", ROWS)
    write_jsonl(workplace.folder / "held-out.jsonl", HELD_OUT)
    return workplace


class Expected:
    """The run in float64, on transformers' own model: each answer goes through it alone."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64) for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)

    def step(self, numbers: range) -> Mapping[str, float]:
        """An update on some of the rows; its figures."""
        margins, kl = self._margins(ROWS, numbers)
        weights = torch.tensor([DESIRABLE if ROWS[number]["label"] else UNDESIRABLE for number in numbers])
        loss = (weights * (1 - torch.sigmoid(margins))).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss.item(), "grad_norm": float(norm), "kl": kl, "rewards/margins": margins.mean().item()}

    def measured(self) -> Mapping[str, float]:
        """The figures of the held-out rows."""
        with torch.no_grad():
            margins, kl = self._margins(HELD_OUT, range(len(HELD_OUT)))
        return {
            "rewards/margins": float(margins.mean()),
            "rewards/accuracies": float((margins > 0).double().mean()),
            "kl": kl,
        }

    def _margins(self, rows: list[dict[str, Any]], numbers: range) -> tuple[Tensor, float]:
        others = [self._ratio(rows[number]["prompt"], rows[number - 1]["completion"]).detach() for number in numbers]
        kl = max(float(torch.stack(others).mean()), 0.0)
        own = torch.stack([self._ratio(rows[number]["prompt"], rows[number]["completion"]) for number in numbers])
        signs = torch.tensor([1.0 if rows[number]["label"] else -1.0 for number in numbers])
        return BETA * signs * (own - kl), kl

    def _ratio(self, prompt: str, answer: str) -> Tensor:
        """The answer's log-probability less the reference's."""
        begun, ended = self.tokenizer.encode(prompt), [*self.tokenizer.encode(answer), self.tokenizer.eos_token_id]
        tokens = torch.tensor([begun + ended])
        found = []
        for model in (self.policy, self.reference):
            logprobs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            found.append(logprobs[len(begun) - 1 :].sum())
        return found[0] - found[1].detach()


@pytest.mark.parametrize("trainer", ["fsdp2", "megatron"])
def test_three_steps_are_those_of_an_independent_computation(place: Workplace, model: Path, trainer: str) -> None:
    run = place.train("kto.toml", f"trainer.name={trainer}", *MEASURED)
    expected = Expected(model)
    first, *records = read_metrics(run)
    assert {first[f"eval/{name}"] for name in expected.measured()} == {0.0}
    for step, record in enumerate(records):
        figures = expected.step(range(4 * step, 4 * step + 4))
        assert {name: record[name] for name in figures} == {name: close(value) for name, value in figures.items()}
    assert max(record["kl"] for record in records) > 0.01
    measured = expected.measured()
    assert {name: records[-1][f"eval/{name}"] for name in measured} == {name: close(measured[name]) for name in measured}
    weights = load_file(run / "model" / "model.safetensors")
    for name, tensor in expected.policy.named_parameters():
        torch.testing.assert_close(weights[name].double(), tensor.detach(), atol=2e-5, rtol=1e-5)


def test_a_resumed_run_equals_one_that_was_never_stopped(place: Workplace) -> None:
    options = ("run.num_steps=4", "training.minibatches_per_step=2", "checkpoint.every_n_steps=2", "data.train.shuffle=true")
    whole = place.train("kto.toml", *options, "run.name=whole")
    part = place.train("kto.toml", *options, "run.name=part", "run.num_steps=2")
    place.train("kto.toml", *options, "run.name=part", "--resume")
    assert read_metrics(part) == read_metrics(whole)
    weights, expected = (load_file(run / "model" / "model.safetensors") for run in (part, whole))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_without_a_kl_estimate_the_policy_is_not_asked_before_a_step(place: Workplace) -> None:
    records = read_metrics(place.train("kto.toml", "algorithm.kto.loss=apo_zero", "optimizer.learning_rate=3e-3"))
    assert [record["kl"] for record in records] == [0.0] * 3
    assert records[-1]["rewards/margins"] > records[0]["rewards/margins"] == 0.0


def test_bad_labels_are_told_at_once(place: Workplace) -> None:
    path = write_jsonl(place.folder / "bad.jsonl", [ROWS[0], ROWS[1] | {"label": 3}, {"prompt": "1=", "completion": "2"}])
    result = place.rlcore("check", "kto.toml", f"data.train.path={path}")
    expect_failure(result, 4, "2 of 3 rows of", "line 2 of the file): found 3 as 'label'", "line 3", "no field 'label'")
    result = place.rlcore("check", "kto.toml", "algorithm.name=sft", "data.train.label_field=good")
    expect_failure(result, 2, "data.train.label_field", "which reads no labels")
    result = place.rlcore("check", "kto.toml")
    assert result.exit_code == 0, result.stderr
    assert "4 prompts, 1 update(s)" in result.stdout

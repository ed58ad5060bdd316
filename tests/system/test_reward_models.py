"""A reward model trained on pairs, and then the environment that rewards rollouts: both against plain transformers."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from .system_support import Workplace, close, expect_failure, read_metrics, write_jsonl  # type: ignore[import-not-found]

RECIPE = """
[run]
name = "reward"
num_steps = 3
[model]
path = "{model}"
[algorithm]
name = "bradley_terry"
[algorithm.bradley_terry]
center_rewards_coefficient = 0.1
[data.train]
source = "jsonl"
path = "pairs.jsonl"
shuffle = false
[data.evaluation]
source = "jsonl"
path = "pairs.jsonl"
limit = 4
[rollout]
max_prompt_tokens = 8
max_response_tokens = 8
[training]
prompts_per_step = 3
max_tokens_per_microbatch = 14
[optimizer]
learning_rate = 1e-2
eps = 1e-3
[checkpoint]
export = "hf"
[sinks]
names = []
"""
REWARDED = """
extends = "grpo.toml"
[run]
num_steps = 2
[environment]
name = "reward_model"
[environment.reward_model]
path = "runs/reward/model"
max_batch = 3
[data.train]
source = "jsonl"
path = "prompts.jsonl"
[data.evaluation]
source = "jsonl"
path = "prompts.jsonl"
limit = 4
[logging]
rollouts_every_n_steps = 1
"""
ROWS: list[dict[str, Any]] = [
    {"prompt": f"{n}+{n % 4}=", "chosen": str(n + n % 4), "rejected": "1" * (n % 3 + 1) + "*", "gap": 0.5 * (n * n % 7) - 1}
    for n in range(9)
]
TWO = ("cluster.gpus_per_node=2",)
GAPS = ("data.train.margin_field=gap",)
CASES = {
    "fsdp2": ("trainer.name=fsdp2",),
    "fsdp2-margins": ("trainer.name=fsdp2", *GAPS),
    "fsdp2-two-margins": ("trainer.name=fsdp2", *TWO, *GAPS),
    "megatron-margins": ("trainer.name=megatron", *GAPS),
}
"""On two ranks three pairs leave a rank with an empty microbatch."""


@pytest.fixture
def place(workplace: Workplace, model: Path) -> Workplace:
    """With reward.toml and rewarded.toml, and their data."""
    (workplace.folder / "reward.toml").write_text(RECIPE.format(model=model))
    (workplace.folder / "rewarded.toml").write_text(REWARDED)
    write_jsonl(workplace.folder / "pairs.jsonl", ROWS)
    write_jsonl(workplace.folder / "prompts.jsonl", [{"prompt": row["prompt"]} for row in ROWS])
    return workplace


class Expected:
    """The run in float64, on transformers' own classifier: each answer goes through it alone."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float64)
        torch.nn.init.zeros_(self.model.score.weight)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)

    def reward(self, prompt: str, answer: str) -> torch.Tensor:
        tokens = [*self.tokenizer.encode(prompt), *self.tokenizer.encode(answer), self.tokenizer.eos_token_id]
        return self.model(torch.tensor([tokens])).logits[0, 0]

    def rewards(self, rows: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = ([self.reward(row["prompt"], row[side]) for row in rows] for side in ("chosen", "rejected"))
        return torch.stack(chosen), torch.stack(rejected)

    def step(self, rows: list[dict[str, Any]], *, has_margins: bool) -> dict[str, float]:
        chosen, rejected = self.rewards(rows)
        margins = torch.tensor([row["gap"] if has_margins else 0.0 for row in rows], dtype=torch.float64)
        loss = (-logsigmoid(chosen - rejected - margins) + 0.1 * (chosen + rejected) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {
            "loss": float(loss),
            "grad_norm": float(norm),
            "rewards/margins": float((chosen - rejected).mean()),
            "rewards/accuracies": float((chosen > rejected).double().mean()),
        }


@pytest.mark.wide(keep=["fsdp2-margins", "megatron-margins"])
@pytest.mark.parametrize("case", CASES)
def test_a_reward_model_learns_as_an_independent_computation_does(
    place: Workplace, model: Path, case: str, request: pytest.FixtureRequest
) -> None:
    if TWO[0] in CASES[case]:
        request.getfixturevalue("ray")
    run = place.train("reward.toml", *CASES[case])
    expected = Expected(model)
    records = {int(record["step"]): record for record in read_metrics(run)}
    for step in range(3):
        figures = expected.step(ROWS[3 * step : 3 * step + 3], has_margins=GAPS[0] in CASES[case])
        assert {name: records[step + 1][name] for name in figures} == {name: close(value) for name, value in figures.items()}
    with torch.no_grad():
        chosen, rejected = expected.rewards(ROWS[:4])
    assert records[3]["eval/rewards/margins"] == close(float((chosen - rejected).mean()))
    weights = load_file(run / "model" / "model.safetensors")
    for name, tensor in expected.model.named_parameters():
        torch.testing.assert_close(weights[name].double(), tensor.detach(), atol=2e-5, rtol=1e-5)
    assert 'pipeline_tag: "text-classification"' in (run / "model" / "README.md").read_text()


def test_rollouts_have_the_rewards_that_the_trained_model_gives(place: Workplace) -> None:
    template = "{{ messages[0]['content'] }}"
    reward_model = place.train("reward.toml", "trainer.name=fsdp2", f"model.chat_template='''{template}'''") / "model"
    assert AutoTokenizer.from_pretrained(reward_model).chat_template == template
    assert 'pipeline_tag: "text-classification"' in (reward_model / "README.md").read_text()
    run = place.train("rewarded.toml", "trainer.name=fsdp2", f"environment.reward_model.path={reward_model}")
    expected = Expected(reward_model)
    expected.model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    samples = [row for file in sorted((run / "rollouts").glob("step-*")) for row in parquet.read_table(file).to_pylist()]
    assert len(samples) == 2 * 4 * 4
    with torch.no_grad():
        for sample in samples:
            wanted = float(expected.reward(sample["prompt"], sample["response"]))
            assert sample["reward"] == pytest.approx(wanted, abs=1e-4)
    assert len({round(sample["reward"], 4) for sample in samples}) > 3


def test_what_does_not_go_with_a_reward_model_is_told(place: Workplace, model: Path) -> None:
    beside = ("environment.name=arithmetic",)
    expect_failure(place.rlcore("check", "reward.toml", *beside), 2, "nothing generates")
    expect_failure(place.rlcore("check", "reward.toml", "lora.rank=2"), 2, "a model of values")
    margins = (*GAPS, "algorithm.name=dpo")
    expect_failure(place.rlcore("check", "reward.toml", *margins), 2, "data.train.margin_field", "reads no margins")
    language = f"environment.reward_model.path={model}"
    expect_failure(place.rlcore("check", "rewarded.toml", language), 5, "architecture Qwen3ForCausalLM")

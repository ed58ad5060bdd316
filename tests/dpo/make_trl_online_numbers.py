"""Make trl_online_numbers.json: what TRL's OnlineDPOTrainer makes of given answers, log-probabilities and rewards.

Run in an environment with trl 1.16.0 and torch: `python make_trl_online_numbers.py`. TRL's own training step is called with
stand-ins for generation, models and rewards; nothing of rlcore takes part.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer

LENGTHS = [(3, 4, 2), (2, 5, 5), (1, 1, 6), (4, 3, 3)]
"""Tokens of the prompt and of its two answers."""
REWARDS = [(0.0, 1.0), (0.75, 0.25), (-1.0, 0.5), (1.0, 0.0)]
CASES = [{"loss_type": "sigmoid", "beta": 0.1}, {"loss_type": "sigmoid", "beta": 0.7}, {"loss_type": "ipo", "beta": 0.5}]
METRICS = {
    "logps/chosen": "logps/chosen",
    "logps/rejected": "logps/rejected",
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
    "rewards/margins": "rewards/margins",
    "rewards/accuracies": "rewards/accuracies",
    "score_margin": "objective/scores_margin",
}
"""TRL's name of each metric."""


def main() -> None:
    torch.manual_seed(0)
    lengths = [
        row[1 + answer] for answer in (0, 1) for row in LENGTHS
    ]  # TRL's batch is all first answers, then all second ones
    width = max(lengths)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    policy = -torch.empty(len(lengths), width, dtype=torch.float64).exponential_(0.5)
    reference = policy + 0.8 * torch.randn(len(lengths), width, dtype=torch.float64)
    found = {
        "trl": trl.__version__,
        "lengths": LENGTHS,
        "rewards": REWARDS,
        "logprobs": _by_prompt(policy),
        "reference_logprobs": _by_prompt(reference),
        "cases": [],
    }
    for case in CASES:
        leaf = policy.clone().requires_grad_()
        loss, stats = _run(leaf, reference, mask, **case)
        metrics = {name: stats[of_trl][0] for name, of_trl in METRICS.items()}
        found["cases"].append({"options": case, "loss": loss, "metrics": metrics, "gradient": _by_prompt(leaf.grad)})
    Path(__file__).with_name("trl_online_numbers.json").write_text(json.dumps(found, indent=1) + "\n")


def _by_prompt(values: torch.Tensor) -> list[list[float]]:
    """The values of each answer's tokens, the two answers of a prompt after each other."""
    count = len(LENGTHS)
    return [values[answer * count + row, : LENGTHS[row][1 + answer]].tolist() for row in range(count) for answer in (0, 1)]


def _run(
    policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor, *, loss_type: str, beta: float
) -> tuple[float, dict[str, list[float]]]:
    """TRL's loss, whose gradient goes to `policy`, and its metrics."""
    count = len(LENGTHS)
    trainer = object.__new__(OnlineDPOTrainer)
    stats: dict[str, list[float]] = defaultdict(list)
    rewards = torch.tensor([REWARDS[row][answer] for answer in (0, 1) for row in range(count)], dtype=torch.float64)
    tokens = torch.ones_like(mask)
    vars(trainer).update(
        _beta=beta,
        args=SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=None,
            loss_type=loss_type,
            torch_empty_cache_steps=None,
            optim="adamw_torch",
            n_gpu=1,
            gradient_accumulation_steps=1,
        ),
        accelerator=SimpleNamespace(gather_for_metrics=lambda values: values, backward=lambda loss, **_: loss.backward()),
        eos_token_ids=[0],
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        ref_model="reference",
        reward_funcs=[len],
        stats=stats,
        state=SimpleNamespace(epoch=0),
        _generate=lambda *_: (tokens[:count], mask[:count], tokens, mask, None),
        _forward=lambda model, *_: reference if model == "reference" else policy,
        _calculate_rewards_from_functions=lambda **_: rewards,
    )
    inputs = {"prompt": [""] * count}
    loss = OnlineDPOTrainer.training_step(trainer, SimpleNamespace(train=lambda: None), inputs)
    return loss.item(), stats


if __name__ == "__main__":
    main()

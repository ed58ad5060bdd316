"""Make trl_numbers.json: what TRL's DPOTrainer makes of given log-probabilities, its loss, gradients and metrics.

Run in an environment with trl 1.16.0 and torch: `python make_trl_numbers.py`. TRL's own loss function is called with stand-ins
for its models, which return the log-probabilities; nothing of rlcore takes part.
"""

import json
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import trl
from trl.trainer import dpo_trainer

LENGTHS = [(3, 4, 2), (2, 5, 5), (1, 1, 6), (4, 3, 3), (2, 7, 1)]
"""Tokens of the prompt, of the chosen and of the rejected answer."""
CASES = [
    {"loss_types": ["sigmoid"], "beta": 0.1},
    {"loss_types": ["sigmoid"], "beta": 0.7},
    {"loss_types": ["sigmoid_norm"], "beta": 2.0},
    {"loss_types": ["robust"], "beta": 0.3, "label_smoothing": 0.2},
    {"loss_types": ["hinge"], "beta": 0.2},
    {"loss_types": ["ipo"], "beta": 0.5},
    {"loss_types": ["apo_zero"], "beta": 0.3},
    {"loss_types": ["apo_down"], "beta": 0.3},
]


def main() -> None:
    torch.manual_seed(0)
    rows = [answer for prompt, chosen, rejected in LENGTHS for answer in ((prompt, chosen), (prompt, rejected))]
    order = [*range(0, len(rows), 2), *range(1, len(rows), 2)]  # TRL's batch is all chosen answers, then all rejected ones
    width = max(map(sum, rows))
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for number, index in enumerate(order):
        prompt, answer = rows[index]
        mask[number, prompt : prompt + answer] = 1
    policy = -torch.empty(len(rows), width - 1, dtype=torch.float64).exponential_(0.5) * mask[:, 1:]
    reference = (policy + 0.8 * torch.randn(len(rows), width - 1, dtype=torch.float64)) * mask[:, 1:]
    found = {
        "trl": trl.__version__,
        "lengths": LENGTHS,
        "logprobs": [_of_row(policy, order, rows, index) for index in range(len(rows))],
        "reference_logprobs": [_of_row(reference, order, rows, index) for index in range(len(rows))],
        "cases": [],
    }
    for case in CASES:
        leaf = policy.clone().requires_grad_()
        loss, metrics = _run(leaf, reference, mask, **case)
        loss.backward()
        gradient = [_of_row(leaf.grad, order, rows, index) for index in range(len(rows))]
        found["cases"].append({"options": case, "loss": loss.item(), "metrics": metrics, "gradient": gradient})
    Path(__file__).with_name("trl_numbers.json").write_text(json.dumps(found, indent=1) + "\n")


def _of_row(values: torch.Tensor, order: list[int], rows: list[tuple[int, int]], index: int) -> list[float]:
    """The values of an answer's tokens."""
    prompt, answer = rows[index]
    return values[order.index(index), prompt - 1 : prompt - 1 + answer].tolist()


def _run(
    policy: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    *,
    loss_types: list[str],
    beta: float,
    label_smoothing: float = 0.0,
) -> tuple[torch.Tensor, dict[str, float]]:
    """TRL's loss and metrics."""
    trainer = object.__new__(dpo_trainer.DPOTrainer)
    metrics: dict[str, list[float]] = defaultdict(list)
    vars(trainer).update(
        beta=beta,
        label_smoothing=label_smoothing,
        loss_types=loss_types,
        loss_weights=[1.0] * len(loss_types),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        precompute_ref_logps=False,
        use_weighting=False,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(
            device="cpu",
            gather=lambda values: values,
            gather_for_metrics=lambda values: values,
            unwrap_model=lambda model: model,
        ),
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        model=StandIn(policy),
        ref_model=StandIn(reference),
        _metrics={"train": metrics},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    with mock.patch.object(dpo_trainer, "disable_gradient_checkpointing", return_value=nullcontext()):
        loss = trainer._compute_loss(trainer.model, inputs, False)
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")
    return loss, {name: metrics[name][0] for name in names}


class StandIn(torch.nn.Module):
    """Returns given log-probabilities, whatever it is asked."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        super().__init__()
        self.logprobs = logprobs

    def forward(self, **kwargs: object) -> SimpleNamespace:
        zeros = torch.zeros_like(self.logprobs)
        return SimpleNamespace(log_probs=self.logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


if __name__ == "__main__":
    main()

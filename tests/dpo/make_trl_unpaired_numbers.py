"""Writes trl_unpaired_numbers.json: losses and gradients of TRL's KTOTrainer and ORPOTrainer on given log-probabilities.

    python tests/dpo/make_trl_unpaired_numbers.py

needs trl 1.16.0 and torch. TRL's own loss functions are called with stand-ins for its models; nothing of rlcore takes part.
"""

import json
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import trl
from trl.experimental.orpo import orpo_trainer
from trl.trainer import kto_trainer

LENGTHS = [(3, 4), (2, 5), (1, 6), (4, 3), (2, 1)]
"""Tokens of the prompt and of the answer of each row."""
LABELS = [True, False, False, True, True]
KTO_CASES = [
    {"loss": "kto", "beta": 0.1},
    {"loss": "kto", "beta": 0.7, "desirable_weight": 1.3, "undesirable_weight": 0.6},
    {"loss": "apo_zero", "beta": 0.3},
]
ORPO_BETAS = [0.1, 1.5]
WIDTH = 12


def main() -> None:
    torch.manual_seed(0)
    num_rows = len(LENGTHS)
    other = [LENGTHS[number - 1][1] for number in range(num_rows)]
    own_mask = _mask([(prompt, answer) for prompt, answer in LENGTHS])
    other_mask = _mask([(prompt, answer) for (prompt, _), answer in zip(LENGTHS, other, strict=True)])
    columns = {}
    for name, mask in (("own", own_mask), ("other", other_mask)):
        policy = -torch.empty(num_rows, WIDTH - 1, dtype=torch.float64).exponential_(0.5) * mask[:, 1:]
        reference = (policy - 0.3 + 0.8 * torch.randn(num_rows, WIDTH - 1, dtype=torch.float64)) * mask[:, 1:]
        columns[name] = (policy, reference, mask)
    found = {"trl": trl.__version__, "lengths": LENGTHS, "labels": LABELS, "kto": [], "orpo": []}
    for name, (policy, reference, mask) in columns.items():
        found[name] = {"policy": _ragged(policy, mask), "reference": _ragged(reference, mask)}
    for case in KTO_CASES:
        leaf = columns["own"][0].clone().requires_grad_()
        loss, kl = _kto(leaf, columns, **case)
        loss.backward()
        found["kto"].append({"options": case, "loss": loss.item(), "kl": kl, "gradient": _ragged(leaf.grad, own_mask)})
    # The first four rows as two pairs, by the means of their answers' log-probabilities.
    policy, _, mask = columns["own"]
    for beta in ORPO_BETAS:
        leaf = policy[:4].clone().requires_grad_()
        means = leaf.sum(1) / mask[:4].sum(1)
        trainer = object.__new__(orpo_trainer.ORPOTrainer)
        vars(trainer).update(beta=beta, accelerator=SimpleNamespace(device="cpu"))
        losses = -trainer.odds_ratio_loss(means[0::2], means[1::2])[0]
        losses.mean().backward()
        found["orpo"].append({"beta": beta, "losses": losses.tolist(), "gradient": _ragged(leaf.grad, mask[:4])})
    Path(__file__).with_name("trl_unpaired_numbers.json").write_text(json.dumps(found, indent=1) + "\n")


def _mask(rows: list[tuple[int, int]]) -> torch.Tensor:
    mask = torch.zeros(len(rows), WIDTH, dtype=torch.long)
    for number, (prompt, answer) in enumerate(rows):
        mask[number, prompt : prompt + answer] = 1
    return mask


def _ragged(values: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    """The values of each row's answer tokens."""
    return [row[kept].tolist() for row, kept in zip(values, mask[:, 1:].bool(), strict=True)]


def _kto(
    policy: torch.Tensor,
    columns: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    loss: str,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[torch.Tensor, float]:
    """TRL's loss and KL estimate."""
    (_, own_reference, own_mask), (other_policy, other_reference, other_mask) = columns["own"], columns["other"]
    trainer = object.__new__(kto_trainer.KTOTrainer)
    metrics: dict[str, list[float]] = defaultdict(list)
    vars(trainer).update(
        beta=beta,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
        loss_type={"kto": "kto", "apo_zero": "apo_zero_unpaired"}[loss],
        calculate_KL=loss == "kto",
        precompute_ref_logps=False,
        aux_loss_enabled=False,
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda values: values, unwrap_model=lambda model: model),
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        model=StandIn(policy, other_policy),
        ref_model=StandIn(own_reference, other_reference),
        _metrics={"train": metrics, "eval": metrics},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "label": torch.tensor(LABELS),
        "input_ids": torch.zeros_like(own_mask),
        "attention_mask": torch.ones_like(own_mask),
        "completion_mask": own_mask,
        # Ones tell the stand-ins which of the two batches they see.
        "KL_input_ids": torch.ones_like(other_mask),
        "KL_attention_mask": torch.ones_like(other_mask),
        "KL_completion_mask": other_mask,
    }
    with mock.patch.object(kto_trainer, "disable_gradient_checkpointing", return_value=nullcontext()):
        found = trainer._compute_loss(trainer.model, inputs, False)
    return found, metrics["kl"][0]


class StandIn(torch.nn.Module):
    """Returns given log-probabilities: of the rows' own answers, or of other rows' answers where ids are 1."""

    def __init__(self, own: torch.Tensor, other: torch.Tensor) -> None:
        super().__init__()
        self.own, self.other = own, other

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> SimpleNamespace:
        logprobs = self.other if input_ids.any() else self.own
        zeros = torch.zeros_like(logprobs)
        return SimpleNamespace(log_probs=logprobs, entropy=zeros, mean_logits=zeros)


if __name__ == "__main__":
    main()

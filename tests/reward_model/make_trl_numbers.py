"""Make trl_numbers.json: what TRL's RewardTrainer makes of given rewards, its loss, gradients and metrics.

Run in an environment with trl 1.16.0 and torch: `python make_trl_numbers.py`. TRL's own loss function is called with a stand-in
for its model, which returns the rewards; nothing of rlcore takes part.
"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from trl.trainer.reward_trainer import RewardTrainer


def main() -> None:
    torch.manual_seed(0)
    chosen, rejected = 2.0 * torch.randn(5, dtype=torch.float64), 2.0 * torch.randn(5, dtype=torch.float64)
    found = {"trl": trl.__version__, "chosen": chosen.tolist(), "rejected": rejected.tolist(), "cases": []}
    for coefficient in (None, 0.01, 0.3):
        leaf = torch.cat([chosen, rejected]).requires_grad_()
        metrics = defaultdict(lambda: defaultdict(list))
        accelerator = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
        stand_in = SimpleNamespace(
            model=SimpleNamespace(training=True),
            args=SimpleNamespace(center_rewards_coefficient=coefficient),
            accelerator=accelerator,
            _metrics=metrics,
            _total_train_tokens=0,
            _tp_size=1,
        )
        inputs = {"input_ids": torch.zeros(10, 1), "attention_mask": torch.ones(10, 1)}
        model = lambda **_: SimpleNamespace(logits=leaf[:, None])  # noqa: B023, E731
        loss = RewardTrainer.compute_loss(stand_in, model, inputs)
        (gradient,) = torch.autograd.grad(loss, leaf)
        case = {
            "center_rewards_coefficient": coefficient,
            "loss": loss.item(),
            "gradients": gradient.tolist(),
            "accuracy": metrics["train"]["accuracy"][0],
            "margin": metrics["train"]["margin"][0],
        }
        found["cases"].append(case)
    Path(__file__).with_name("trl_numbers.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

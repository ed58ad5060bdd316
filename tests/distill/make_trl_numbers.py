"""Write trl_numbers.json: the generalised Jensen-Shannon divergence of given logits, and its gradient, by TRL's own code.

    python tests/distill/make_trl_numbers.py

needs trl 1.16.0 and torch, and nothing of rlcore.
"""

import json
from pathlib import Path

import torch
import trl
from trl.experimental.gkd.gkd_trainer import GKDTrainer

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
POSITIONS, VOCABULARY = 4, 7


def main() -> None:
    torch.manual_seed(0)
    student = 1.5 * torch.randn(POSITIONS, VOCABULARY, dtype=torch.float64)
    teacher = 1.5 * torch.randn(POSITIONS, VOCABULARY, dtype=torch.float64)
    cases = []
    for beta in BETAS:
        leaf = student.clone().requires_grad_()
        labels = torch.zeros(1, POSITIONS, dtype=torch.long)
        loss = GKDTrainer.generalized_jsd_loss(leaf[None], teacher[None], labels=labels, beta=beta)
        loss.backward()
        cases.append({"beta": beta, "loss": loss.item(), "gradient": leaf.grad.tolist()})
    found = {"trl": trl.__version__, "student": student.tolist(), "teacher": teacher.tolist(), "cases": cases}
    Path(__file__).with_name("trl_numbers.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

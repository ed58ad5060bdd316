"""A step of plain transformers and torch."""

from pathlib import Path

import torch
from torch import Tensor

from rlcore.spi import LossInputs, LossOutput, LossSpec, TokenBatch
from rlcore_torchkit.testing.families.backends import OPTIMIZER
from rlcore_torchkit.testing.families.reference import Reference


def weighted_loss(inputs: LossInputs, config: None) -> LossOutput:
    """-Σ weight · logp over loss tokens, divided by their global count."""
    del config
    weights = inputs.token_columns["weights"] * inputs.loss_mask.float()
    return LossOutput(loss=-(weights * inputs.logprobs).sum() / inputs.counts.num_loss_tokens)


LOSS = LossSpec(path=f"{__name__}:weighted_loss", config=None, token_columns=("weights",))


class TrainedReference(Reference):
    """A model as torch trains it."""

    def step(self, batch: TokenBatch) -> tuple[float, float]:
        """One step; returns the loss and the gradient's norm."""
        weights = torch.from_numpy(batch.token_columns["weights"] * batch.loss_mask)
        loss = -(weights * self.logprobs(batch)).sum() / batch.counts().num_loss_tokens
        loss.backward()
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        torch.optim.AdamW(parameters, lr=OPTIMIZER.learning_rate, eps=OPTIMIZER.eps, weight_decay=0.0, foreach=False).step()
        return loss.item(), norm.item()

    def saved(self, directory: Path) -> dict[str, Tensor]:
        """The tensors that save_pretrained writes now."""
        from safetensors.torch import load_file

        self.model.save_pretrained(directory)
        return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}

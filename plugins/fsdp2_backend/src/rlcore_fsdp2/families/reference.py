"""Plain transformers and torch: one sequence at a time, the class's own eager attention, no cache.

Shapes: T tokens of all sequences.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.spi import LossInputs, LossOutput, LossSpec, ModelSpec, OptimizerSpec, TokenBatch

OPTIMIZER = OptimizerSpec(learning_rate=0.1, eps=1.0, max_grad_norm=0.0)
"""AdamW's epsilon: so large that the first step is nearly the gradient, and the weights after it show each gradient."""
LENGTHS = (3, 9, 14, 2, 11)


def weighted_loss(inputs: LossInputs, config: None) -> LossOutput:
    """-Σ weight · logp over loss tokens, divided by their global count."""
    del config
    weights = inputs.token_columns["weights"] * inputs.loss_mask.float()
    return LossOutput(loss=-(weights * inputs.logprobs).sum() / inputs.counts.num_loss_tokens)


LOSS = LossSpec(path=f"{__name__}:weighted_loss", config=None, token_columns=("weights",))


def make_batch(highest: int) -> TokenBatch:
    """Random sequences of LENGTHS, of tokens from 2 to below `highest`, which leaves out special ones."""
    rng = np.random.default_rng(0)
    offsets = np.cumsum([0, *LENGTHS]).astype(np.int64)
    num_tokens = int(offsets[-1])
    loss_mask = np.ones(num_tokens, np.bool_)
    loss_mask[offsets[:-1]] = False
    return TokenBatch(
        tokens=rng.integers(2, highest, num_tokens).astype(np.int32),
        offsets=offsets,
        loss_mask=loss_mask,
        token_columns={"weights": rng.normal(size=num_tokens).astype(np.float32)},
    )


class Reference:
    """A model as transformers computes and torch trains it."""

    def __init__(self, model: ModelSpec, kind: Any = None) -> None:
        """`kind` is the class of transformers that loads the model, AutoModelForCausalLM by default."""
        from transformers import AutoModelForCausalLM

        options = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": model.trust_remote_code}
        self._model: Any = (kind or AutoModelForCausalLM).from_pretrained(model.path, use_safetensors=True, **options)
        self._model.eval()
        self.model_type: str = self._model.config.model_type
        self.vocab_size: int = self._model.get_input_embeddings().weight.shape[0]

    def batch(self, highest: int) -> TokenBatch:
        """A batch of `make_batch`."""
        return make_batch(highest)

    def logits(self, tokens: Tensor, files: tuple[bytes, ...]) -> Tensor:  # noqa: ARG002
        """float32 [length, vocabulary] of one sequence, which reads no files."""
        found: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0]
        return found

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """float32 [T], 0.0 at the first token of each sequence."""
        found = []
        for number, tokens in enumerate(np.split(batch.tokens, batch.offsets[1:-1])):
            row = torch.from_numpy(tokens).long()
            logits = self.logits(row, () if batch.images is None else batch.images[number])[:-1].float()
            found += [torch.zeros(1), logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]]
        return torch.cat(found)

    def step(self, batch: TokenBatch) -> tuple[float, float]:
        """One step; returns the loss and the gradient's norm."""
        weights = torch.from_numpy(batch.token_columns["weights"] * batch.loss_mask)
        loss = -(weights * self.logprobs(batch)).sum() / batch.counts().num_loss_tokens
        loss.backward()
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        torch.optim.AdamW(parameters, lr=OPTIMIZER.learning_rate, eps=OPTIMIZER.eps, weight_decay=0.0, foreach=False).step()
        return loss.item(), norm.item()

    def saved(self, directory: Path) -> dict[str, Tensor]:
        """The tensors that save_pretrained writes now."""
        from safetensors.torch import load_file

        self._model.save_pretrained(directory)
        return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}

"""Plain transformers: one sequence at a time, the class's own eager attention, no cache.

Shapes: T tokens of all sequences.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.spi import ModelSpec, TokenBatch

LENGTHS = (3, 9, 14, 2, 11)
"""Tokens of the sequences of `make_batch`."""
SPECIAL = 16
"""The last tokens of a vocabulary, which may stand for images and the like."""


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
    """A model as transformers computes it in float32."""

    def __init__(self, model: ModelSpec, kind: Any = None) -> None:
        """`kind` is the class of transformers that loads the model, AutoModelForCausalLM by default."""
        from transformers import AutoModelForCausalLM

        options = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": model.trust_remote_code}
        self.model: Any = (kind or AutoModelForCausalLM).from_pretrained(model.path, use_safetensors=True, **options).eval()
        self.model_type: str = self.model.config.model_type
        self.vocab_size: int = self.model.get_input_embeddings().weight.shape[0]

    def batch(self, highest: int) -> TokenBatch:
        """A batch of `make_batch`."""
        return make_batch(highest)

    def logits(self, tokens: Tensor, files: tuple[bytes, ...]) -> Tensor:  # noqa: ARG002
        """float32 [length, vocabulary] of one sequence, which reads no files."""
        found: Tensor = self.model(input_ids=tokens[None], use_cache=False).logits[0]
        return found

    def logprobs(self, batch: TokenBatch) -> Tensor:
        """float32 [T], 0.0 at the first token of each sequence."""
        found = []
        for number, tokens in enumerate(np.split(batch.tokens, batch.offsets[1:-1])):
            row = torch.from_numpy(tokens).long()
            logits = self.logits(row, () if batch.images is None else batch.images[number])[:-1].float()
            found += [torch.zeros(1), logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]]
        return torch.cat(found)

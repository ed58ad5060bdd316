"""Batches that read images, and transformers' own forward of one sequence and its images at a time."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from attrs import evolve
from fsdp2_support import OPTIMIZER, TEMPERATURE, Reference, make_batch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from rlcore.spi import OptimizerSpec, TokenBatch
from rlcore.spi.arrays import offsets_of

SIZES = ((16, 24), (9, 40), (40, 48))
"""Width and height of images, scaled to multiples of 8 pixels with a token each."""
READS = ((0,), (), (1, 0), (), (1,), ())
"""The images of each of the six sequences of `make_batch`."""


def png(number: int, seed: int = 0) -> bytes:
    """An image of noise."""
    width, height = SIZES[number]
    pixels = np.random.default_rng([number, seed]).integers(0, 256, (height, width, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


class ImageReference(Reference):
    """Transformers' class with its own pixels and positions; what is `frozen` is no parameter of the optimizer."""

    def __init__(self, directory: Path, spec: OptimizerSpec = OPTIMIZER, frozen: str | None = None) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.processor = AutoImageProcessor.from_pretrained(directory)
        self.spec = spec
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(frozen is None or frozen not in name)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": spec.weight_decay},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=spec.learning_rate, fused=False, foreach=False)

    def logits(self, tokens: torch.Tensor, files: tuple[bytes, ...]) -> torch.Tensor:
        """float32 [length, vocabulary] of one sequence."""
        inputs = {}
        if files:
            images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
            inputs = dict(self.processor(images=images, return_tensors="pt"))
            inputs["mm_token_type_ids"] = (tokens == self.model.config.image_token_id).int()[None]
        self.model.model.rope_deltas = None
        return self.model(input_ids=tokens[None], use_cache=False, **inputs).logits[0]

    def logprobs(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = [], []
        for n in range(batch.num_sequences):
            tokens = torch.from_numpy(batch.tokens[batch.offsets[n] : batch.offsets[n + 1]]).long()
            files = () if batch.images is None else batch.images[n]
            distribution = torch.distributions.Categorical(logits=self.logits(tokens, files)[:-1] / TEMPERATURE)
            zero = torch.zeros(1)
            logprobs.append(torch.cat([zero, distribution.log_prob(tokens[1:])]))
            entropies.append(torch.cat([zero, distribution.entropy()]))
        return torch.cat(logprobs), torch.cat(entropies)


def image_batch(directory: Path, seed: int, reads: Sequence[Sequence[int]] = READS) -> TokenBatch:
    """The batch of `make_batch` whose sequences begin with their images, by the placeholders of the processor. `reads` are the
    numbers of each sequence's images."""
    tokenizer, processor = AutoTokenizer.from_pretrained(directory), AutoImageProcessor.from_pretrained(directory)
    files = [png(number) for number in range(len(SIZES))]
    grids = processor(images=[Image.open(io.BytesIO(file)) for file in files], return_tensors="pt")["image_grid_thw"]
    start, pad, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    text = make_batch(seed)
    sequences, masks, columns = [], [], []
    for n, numbers in enumerate(reads):
        shown = [token for i in numbers for token in (start, *[pad] * (int(grids[i].prod()) // 4), end)]
        own = slice(text.offsets[n], text.offsets[n + 1])
        sequences.append(np.concatenate([np.array(shown, np.int32), text.tokens[own]]))
        masks.append(np.concatenate([np.zeros(len(shown), np.bool_), text.loss_mask[own]]))
        columns.append(np.concatenate([np.zeros(len(shown), np.float32), text.token_columns["advantages"][own]]))
    return evolve(
        text,
        tokens=np.concatenate(sequences),
        offsets=offsets_of([len(one) for one in sequences]),
        loss_mask=np.concatenate(masks),
        token_columns={"advantages": np.concatenate(columns)},
        images=tuple(tuple(files[i] for i in numbers) for numbers in reads),
    )

"""A few of a step's samples, as sinks show them."""

import numpy as np

from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import LoggedSample, TokenBatch, Tokenizer
from rlcore_rollout.rollout_table import advantages_of, prompt_texts

IMAGE = "[image] "


def logged_samples(collected: CollectedRollouts, trained: TokenBatch, number: int, tokenizer: Tokenizer) -> list[LoggedSample]:
    """At most `number` sequences, spread evenly over the step's, with the advantages that they were trained with."""
    batch, advantages = collected.batch, advantages_of(collected, trained)
    chosen = np.unique(np.linspace(0, batch.num_sequences - 1, min(number, batch.num_sequences)).astype(np.int64))
    found = []
    for sequence, prompt in zip(chosen.tolist(), prompt_texts(collected, tokenizer, chosen), strict=True):
        tokens = slice(int(batch.offsets[sequence]), int(batch.offsets[sequence + 1]))
        counted = None if advantages is None else advantages[tokens][trained.loss_mask[tokens]]
        num_images = 0 if batch.images is None else len(batch.images[sequence])
        found.append(
            LoggedSample(
                group=int(collected.group_ids[sequence]),
                prompt=IMAGE * num_images + prompt,
                response=collected.responses[sequence],
                reward=float(collected.rewards[sequence]),
                advantage=None if counted is None or not counted.size else float(counted.mean(dtype=np.float64)),
            )
        )
    return found

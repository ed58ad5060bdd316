"""Samples of a generator after random prompts, and the distance of their log-probabilities from a model's."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlcore import spi
from rlcore.spi.arrays import Float32Array
from rlcore_torchkit.testing.families.reference import SPECIAL, make_batch

RESPONSES = (14, 3, 9, 1, 6)
"""Tokens that are sampled after each prompt."""
MAX_LENGTH = 48
"""Tokens of the longest sequence that a backend is built for."""


class WrongError(Exception):
    """Numbers that are not those of the reference."""


class Samples:
    """A sample of each sequence of `make_batch`, from a generator that holds weights of `weight_version`."""

    def __init__(self, generator: Any, vocab_size: int, weight_version: int) -> None:
        batch = make_batch(vocab_size - SPECIAL)
        self._prompts = np.split(batch.tokens, batch.offsets[1:-1])
        request = spi.GenerateRequest(
            prompts=spi.RaggedTokens.from_lists([prompt.tolist() for prompt in self._prompts]),
            num_samples=1,
            seeds=np.arange(len(self._prompts)),
            max_tokens=np.array(RESPONSES, np.int32),
            sampling=spi.SamplingParams(temperature=1.0),
            weight_version=weight_version,
        )
        result = generator.generate(request)
        self._responses = np.split(result.tokens, result.offsets[1:-1])
        self.logprobs: Float32Array = result.logprobs

    def distances(self, logprobs: Callable[[spi.TokenBatch], Float32Array]) -> Float32Array:
        """Return |difference| of each sampled token's log-probability from the one that a model has; `logprobs` computes a
        model's of all tokens of a batch."""
        distances: Float32Array = np.abs(self.logprobs - self._of_samples(logprobs))
        return distances

    def rounding(
        self, exact: Callable[[spi.TokenBatch], Float32Array], rounded: Callable[[spi.TokenBatch], Float32Array]
    ) -> float:
        """Return the mean |difference| of what two models have for the sampled tokens."""
        return float(np.abs(self._of_samples(exact) - self._of_samples(rounded)).mean())

    def _of_samples(self, logprobs: Callable[[spi.TokenBatch], Float32Array]) -> Float32Array:
        sequences = [np.concatenate(pair) for pair in zip(self._prompts, self._responses, strict=True)]
        starts = np.cumsum([0, *map(len, sequences)])
        expected = logprobs(batch_of(sequences))
        begins = [start + len(prompt) for start, prompt in zip(starts, self._prompts, strict=False)]
        rows = [expected[begin:stop] for begin, stop in zip(begins, starts[1:], strict=True)]
        return np.concatenate(rows)


def batch_of(sequences: Sequence[np.ndarray]) -> spi.TokenBatch:
    """A batch of these sequences without loss tokens."""
    offsets = np.cumsum([0, *map(len, sequences)]).astype(np.int64)
    tokens = np.concatenate(sequences).astype(np.int32)
    return spi.TokenBatch(tokens=tokens, offsets=offsets, loss_mask=np.zeros(len(tokens), np.bool_))

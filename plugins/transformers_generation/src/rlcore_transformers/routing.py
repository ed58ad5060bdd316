"""Collects the experts of a request's tokens while it runs.

Shapes: S samples, L layers, K experts of a token.
"""

import numpy as np

from rlcore.spi import GenerateRequest
from rlcore.spi.arrays import Int16Array, Int64Array, offsets_of


class Routing:
    """Room for every token that a request may come to, -1 until it has been routed."""

    def __init__(self, request: GenerateRequest, limits: Int64Array, shape: tuple[int, int]) -> None:
        """`limits` int64 [S]: most tokens of each sample; `shape`: L and K."""
        self._num_samples = request.num_samples
        self._prompt_lengths = request.prompts.lengths
        self._offsets = offsets_of(np.repeat(self._prompt_lengths, request.num_samples) + limits)
        self._experts = np.full((int(self._offsets[-1]), *shape), -1, np.int16)

    def add_prompts(self, prompts: Int64Array, experts: Int16Array) -> None:
        """Note the experts int16 [prompts, length, L, K] of the prompts with these numbers, padded on the right."""
        for prompt, rows in zip(prompts.tolist(), experts, strict=True):
            length = int(self._prompt_lengths[prompt])
            for start in self._offsets[prompt * self._num_samples : (prompt + 1) * self._num_samples].tolist():
                self._experts[start : start + length] = rows[:length]

    def add_tokens(self, samples: Int64Array, positions: Int64Array, experts: Int16Array) -> None:
        """Note the experts of one token of each of `samples`, int16 [samples, L, K], at these positions of their sequences."""
        self._experts[self._offsets[samples] + positions] = experts

    def result(self, sample: int, length: int) -> Int16Array:
        """int16 [prompt and length, L, K]: the experts of a sample that has `length` tokens after its prompt."""
        start, prompt = self._offsets[sample], self._prompt_lengths[sample // self._num_samples]
        return self._experts[start : start + prompt + length].copy()

"""The KV cache: places for sequences of different lengths.

Shapes: P prompts, L tokens, B places in use, and of each layer K key-value heads, D head size of keys, E of values.
"""

from typing import Protocol

import torch
from torch import Tensor

LENGTH_STEP = 64
"""Cache lengths are rounded up to a multiple, so that similar requests share one allocation."""


class PromptStates(Protocol):
    """The layers' keys and values of P prompts, padded on the right to L tokens."""

    length: int
    keys: list[Tensor]
    """[P, K, L, D] by layer."""
    values: list[Tensor]
    """[P, K, L, E] by layer."""
    states: list[Tensor]
    """[P, ...] what layers hand from token to token."""


class SlotCache:
    """The sequence in place b fills columns [0, its length).

    Its tensors are made when the first prompt comes, in the shapes and the dtype of what layers computed of it."""

    def __init__(self, num_slots: int, length: int) -> None:
        self.num_slots = num_slots
        self.length = -(-length // LENGTH_STEP) * LENGTH_STEP
        self.keys: list[Tensor] = []
        """[slots, K, length, D] by layer, finite everywhere; values [slots, K, length, E] alike."""
        self.values: list[Tensor] = []
        self.states: list[Tensor] = []
        """[slots, ...] what layers hand from token to token."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values, *self.states))

    def fill(self, first: int, prompts: PromptStates, rows: Tensor) -> None:
        """Copy the prompts numbered `rows` int64 [B] into the places from `first` on."""
        if not self.keys and not self.states:
            self._make(prompts)
        last, length = first + len(rows), prompts.length
        for pool, source in ((self.keys, prompts.keys), (self.values, prompts.values)):
            for slots, prompt in zip(pool, source, strict=True):
                slots[first:last, :, :length] = prompt[rows]
        for slots, prompt in zip(self.states, prompts.states, strict=True):
            slots[first:last] = prompt[rows]

    def take(self, other: "SlotCache", num_slots: int, length: int) -> None:
        """Copy the first `length` columns of the first places of a smaller cache that is not empty."""
        self._make(other)
        for slots, states in zip(self.states, other.states, strict=True):
            slots[:num_slots] = states[:num_slots]
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            mine[:num_slots, :, :length] = theirs[:num_slots, :, :length]

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copy the first `length` columns of the places `sources` int64 [B] to the places `targets`, none of them a source."""
        for slots in (*self.keys, *self.values):
            slots[targets, :, :length] = slots[sources, :, :length]
        for slots in self.states:
            slots[targets] = slots[sources]

    def _make(self, other: PromptStates) -> None:
        """Places for what these sequences keep."""
        self.states = [states.new_zeros((self.num_slots, *states.shape[1:])) for states in other.states]
        self.keys, self.values = (
            [
                torch.zeros(
                    (self.num_slots, states.shape[1], self.length, states.shape[3]), dtype=states.dtype, device=states.device
                )
                for states in layers
            ]
            for layers in (other.keys, other.values)
        )

"""State of shards whose tensors have settings of their own: which state each keeps, in what form."""

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import OptimizerSpec
from rlcore_megatron.training.masters import FACTOR, MASTER, Span
from rlcore_megatron.training.shard_elements import ShardElements
from rlcore_torchkit.optimizer.settings import BLOCK, DECODED_ELEMENTS

MOMENTS = ("exp_avg", "exp_avg_sq")
CODES = tuple(f"{moment}_codes" for moment in MOMENTS)
"""Names of moments in 8 bits, uint8 [n]."""
SCALES = tuple(f"{moment}_scales" for moment in MOMENTS)
"""Names of their scales, float32 [rows, K]: the rows of the parameter that the shard has elements of, and each row's blocks."""
MOMENTUM = "momentum_buffer"


@frozen(kw_only=True)
class StateKind:
    """The settings that decide which state each tensor has."""

    name: str = "adamw"
    """OptimizerSpec.name."""
    moments: str = "float32"
    """OptimizerSpec.moments."""
    outside_muon: tuple[str, ...] = ()
    """Matrices, ascending by name, that groups train with AdamW in place of Muon."""


class ShardStates(torch.optim.Optimizer):
    """The inner optimizer of one of Megatron's distributed optimizers, as the holder of its shards and their state.

    Its own step does nothing: `TensorOptimizer` steps all shards of a rank. Bfloat16 weights are the upper halves of their
    masters, and the state has the lower ones.
    """

    master_weights = True
    """True, as of TransformerEngine's Adam: the state has masters of weights in less than float32."""

    def __init__(self, groups: list[dict[str, Any]], shards: Sequence[ShardElements], spec: OptimizerSpec) -> None:
        """`groups` are those of Megatron's distributed optimizer, which it goes on to read and write."""
        super().__init__([torch.empty(0)], {})  # keys may be views of weights, which torch refuses here
        self.param_groups = groups
        self.shards = {id(shard.key): shard for shard in shards}
        outside_muon = {name for shard in shards for name in shard.outside_muon}
        self.kind = StateKind(name=spec.name, moments=spec.moments, outside_muon=tuple(sorted(outside_muon)))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free gradients, those of another dtype than the weights too, and forget how they were clipped."""
        super().zero_grad(set_to_none)
        for key in (key for group in self.param_groups for key in group["params"]):
            key.decoupled_grad = None
            setattr(key, FACTOR, None)

    def spans(self, key: Tensor, first: int, beyond: int) -> list[Span]:
        """Return elements `first` to `beyond` - 1 of a shard, at most DECODED_ELEMENTS at a time where masters are joined."""
        state, most = self.make(key), beyond - first if key.dtype == torch.float32 else DECODED_ELEMENTS
        return [
            Span(key=key, state=state, first=start, beyond=min(start + most, beyond)) for start in range(first, beyond, most)
        ]

    def names(self, key: Tensor) -> list[str]:
        """Return the names of a shard's state of one value an element."""
        shard = self.shards[id(key)]
        found = [*MOMENTS] if shard.keeps("adamw") else []
        found += CODES if shard.keeps("adamw", eight_bit=True) else ()
        return [*found, MOMENTUM] if shard.keeps("muon") else found

    def make(self, key: Tensor) -> dict[str, Tensor]:
        """Return a shard's state, made of zeros where there is none yet."""
        state: dict[str, Tensor] = self.state[key]
        if state:
            return state
        for name in self.names(key):
            state[name] = torch.zeros_like(key, dtype=torch.uint8 if name in CODES else torch.float32, requires_grad=False)
        if CODES[0] in state:
            shard = self.shards[id(key)]
            shape = shard.num_rows, -(-shard.whole_width // BLOCK)
            state.update({name: torch.zeros(shape, device=key.device) for name in SCALES})
        if key.dtype != torch.float32:
            state[MASTER] = torch.zeros_like(key, dtype=torch.int16, requires_grad=False)
        return state

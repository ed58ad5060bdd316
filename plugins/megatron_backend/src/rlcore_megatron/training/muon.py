"""Muon's step of the matrices of a pipeline stage, each whole, whatever parts of it ranks hold."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rlcore.spi import MuonSpec
from rlcore_megatron.training.masters import Span
from rlcore_megatron.training.matrix_exchange import MatrixExchange
from rlcore_megatron.training.shard_elements import Elements, ShardElements
from rlcore_megatron.training.shard_states import MOMENTUM, ShardStates
from rlcore_megatron.weights.element_runs import MatrixBlock
from rlcore_torchkit.optimizer import muon
from rlcore_torchkit.optimizer.muon import momentum_update, orthogonalized, update_scale
from rlcore_torchkit.optimizer.settings import NO_OVERRIDES, StepOverrides


@frozen(kw_only=True, eq=False)
class _Part:
    """A part of a matrix that this rank updates."""

    shard: ShardElements
    states: ShardStates
    elements: Elements
    block: MatrixBlock

    def update(self, spec: MuonSpec) -> Tensor:
        """PRECISION [n]: the part of what is orthogonalized."""
        parts = [
            momentum_update(span.gradients, span.state[MOMENTUM][span.first : span.beyond], spec).to(muon.PRECISION)
            for span in self._spans()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def add(self, direction: Tensor, share: float, spec: MuonSpec, overrides: StepOverrides) -> None:
        """Decay the weights, and add their part of the orthogonal matrix, [n], times the learning rate."""
        settings = self.elements.settings.overridden(overrides)
        rate = settings.learning_rate * share
        begin, alpha = self.elements.first, -rate * update_scale(*self.block.shape, spec)
        for span in self._spans():
            with span.masters() as masters:
                part = direction[span.first - begin : span.beyond - begin]
                masters.mul_(1 - rate * settings.weight_decay).add_(part, alpha=alpha)

    def _spans(self) -> list[Span]:
        return self.states.spans(self.shard.key, self.elements.first, self.elements.beyond)


class Muon:
    """The step of all matrices that Muon trains on a pipeline stage; made and called on each of its ranks."""

    def __init__(self, shards: Sequence[tuple[ShardElements, ShardStates]], spec: MuonSpec, group: Any) -> None:
        self._spec = spec
        self._parts = [
            _Part(shard=shard, states=states, elements=elements, block=elements.run.block)
            for shard, states in shards
            for elements in shard.elements
            if elements.settings.method == "muon" and elements.run.block is not None
        ]
        self._exchange = MatrixExchange([part.block for part in self._parts], group)

    def step(self, share: float, overrides: StepOverrides = NO_OVERRIDES) -> None:
        """Do a step with this share of the peak learning rates."""
        transform = partial(orthogonalized, spec=self._spec)
        for number, exchanged in enumerate(self._exchange.rounds):
            mine = [self._parts[index] for index in exchanged.mine]
            updates = [part.update(self._spec) for part in mine]
            directions = self._exchange.run(number, updates, muon.PRECISION, transform)
            for part, direction in zip(mine, directions, strict=True):
                part.add(direction, share, self._spec, overrides)

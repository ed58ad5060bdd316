"""The optimizer of a recipe whose `[optimizer]` says more than AdamW with one setting for all: Muon, groups, narrow moments.

Megatron-Core's own Muon (0.16 and later) orthogonalizes fused and stacked parameters, needs another package, and does not run
with the distributed optimizer. This one updates the matrices of the checkpoint, so the meaning is that of the other trainers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from rlcore.spi import MuonSpec, OptimizerSpec
from rlcore_megatron.families.weight_mapping import Names
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.training.adamw import AdamW
from rlcore_megatron.training.masters import FACTOR
from rlcore_megatron.training.muon import Muon
from rlcore_megatron.training.optimizer_shards import parts_of
from rlcore_megatron.training.shard_elements import elements_of
from rlcore_megatron.training.shard_states import ShardStates
from rlcore_torchkit.optimizer.settings import NO_OVERRIDES, StepOverrides


class TensorOptimizer:
    """The step of all shards of this rank; made and called on every rank."""

    def __init__(
        self,
        models: Sequence[Any],
        optimizer: MegatronOptimizer,
        names: Sequence[Names],
        layout: ParallelLayout,
        spec: OptimizerSpec,
    ) -> None:
        """`names` are those of all parameters that train. The inner optimizers of `optimizer` become ShardStates."""
        self._states, shards = [], []
        for part, of_part in zip(parts_of(optimizer), elements_of(models, optimizer, names, layout, spec), strict=True):
            part.optimizer = ShardStates(part.optimizer.param_groups, of_part, spec)
            self._states.append(part.optimizer)
            shards += [(shard, part.optimizer) for shard in of_part]
        # Tensor, context, expert and data-parallel ranks: all that hold something of a stage.
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        self._adamw = AdamW(shards, spec.eps, group)
        self._muon_step = Muon(shards, spec.muon or MuonSpec(), group) if spec.name == "muon" else None

    @torch.no_grad()
    def step(self, share: float, overrides: StepOverrides = NO_OVERRIDES) -> None:
        """Update every master by its gradient, with this share of the peak learning rates."""
        num_steps = 1 + max((group.get("step", 0) for states in self._states for group in states.param_groups), default=0)
        self._adamw.step(share, num_steps, overrides)
        if self._muon_step is not None:
            self._muon_step.step(share, overrides)
        for states in self._states:
            for group in states.param_groups:
                group["step"] = num_steps
                for key in group["params"]:
                    setattr(key, FACTOR, None)

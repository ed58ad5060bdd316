"""Reads and writes the optimizer's state as float32, whatever it is kept in: masters of the weights, and Adam's moments.

Its keys are float32 masters as a rule. Those of `ShardStates` are the weights, beside remainders of bfloat16 ones. With
`use_precision_aware_optimizer` they are the weights too, and TransformerEngine's Adam keeps masters and moments in types that
the recipe chooses. With `optimizer_cpu_offload` masters and moments belong to optimizers on the host, or a part of them.
"""

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from rlcore_megatron.training.masters import MASTER
from rlcore_megatron.training.optimizer_shards import Shard, parts_of
from rlcore_megatron.training.shard_states import MOMENTS, ShardStates
from rlcore_torchkit.optimizer.one_pass import divided, joined


def optimizers_of(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that hold state and count steps."""
    parts = [part.optimizer for part in parts_of(optimizer)]
    return [one for part in parts for one in (part.sub_optimizers if isinstance(part, HybridDeviceOptimizer) else [part])]


def count_steps(optimizer: MegatronOptimizer) -> int:
    """Steps done: torch's Adam counts them for each parameter, TransformerEngine's and apex's for each group."""
    counts = [0]
    for one in optimizers_of(optimizer):
        counts += [int(record["step"]) for record in (*one.param_groups, *one.state.values()) if "step" in record]
    return max(counts)


@torch.no_grad()
def make_state(optimizer: MegatronOptimizer, num_steps: int) -> None:
    """Something to fill for every parameter, with that count of steps; where no step was done, moments at most as zeros."""
    for one in optimizers_of(optimizer):
        if not num_steps:
            one.state.clear()
        by_parameter = isinstance(one, torch.optim.Adam)
        for group in one.param_groups:
            if not by_parameter:  # ShardStates and TransformerEngine's
                group.pop("step", None)
                group.update({"step": num_steps} if num_steps else {})
            for key in group["params"]:
                if num_steps or _holds_masters(one, key):
                    _make_state_of(one, key)
                if num_steps and by_parameter:
                    one.state[key]["step"] = torch.tensor(float(num_steps))  # one for each: torch adds to it in place
    for part in parts_of(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer._sync_sub_optimizers_state_to_hdo()


def names_of(shard: Shard) -> list[str]:
    """Return the names of a shard's state of one value an element, beside masters."""
    return shard.optimizer.names(shard.key) if isinstance(shard.optimizer, ShardStates) else [*MOMENTS]


def read(shard: Shard, name: str) -> Tensor:
    """float32 [n], or uint8 [n] codes of moments in 8 bits: masters or state of a shard. The optimizer's own memory where it
    has it so, else a copy on the host, where there is room."""
    key = shard.key.detach()
    optimizer: Any = shard.optimizer
    kept: Tensor | None = shard.state.get(name)
    if name == MASTER:
        if isinstance(optimizer, HybridDeviceOptimizer):
            return optimizer.param_to_inner_param[shard.key].detach()
        if not _holds_masters(optimizer, shard.key):
            return key
        if kept is None:
            return key.cpu().float()
        if kept.dtype == torch.int16:
            return joined(key, kept).cpu()
    assert kept is not None
    is_own = kept.dtype == torch.float32 or isinstance(optimizer, ShardStates)
    return kept if is_own else optimizer.get_unscaled_state(shard.key, name).cpu()


def write(shard: Shard, name: str, value: Tensor) -> None:
    """Put what `read` returned, filled since, where it belongs; weights too, if they are masters'."""
    key = shard.key.detach()
    optimizer: Any = shard.optimizer
    kept: Tensor | None = shard.state.get(name)
    if name == MASTER:
        if kept is not None and kept.dtype == torch.int16:
            weights, remainders = divided(value)
            key.copy_(weights)
            kept.copy_(remainders)
            return
        if key.dtype != torch.float32:
            key.copy_(value)
    if kept is not None and kept.dtype != torch.float32 and not isinstance(optimizer, ShardStates):
        optimizer.set_scaled_state(shard.key, name, value)


def _holds_masters(optimizer: Any, key: Tensor) -> bool:
    """Return whether what it updates is a rounded copy of its own."""
    return bool(getattr(optimizer, "master_weights", False)) and key.dtype != torch.float32


def _make_state_of(optimizer: Any, key: Tensor) -> None:
    if isinstance(optimizer, ShardStates):
        optimizer.make(key)
        return
    state = optimizer.state[key]
    if hasattr(optimizer, "initialize_state"):  # TransformerEngine's, which knows its types
        if not state:
            optimizer.initialize_state(key, optimizer.store_param_remainders and key.dtype == torch.bfloat16)
        return
    for moment in MOMENTS:
        if moment not in state:
            state[moment] = torch.zeros_like(key)

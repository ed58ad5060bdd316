"""Megatron's process groups, which are global to a process: made for the first trainer in it and destroyed with the last."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from attrs import frozen
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from rlcore.spi import ContractError, RankInfo
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_torchkit.distributed import process_group

_users: list[ParallelLayout] = []


def join(rank_info: RankInfo, layout: ParallelLayout, timeout_s: float) -> None:
    """Make the groups of `layout`, or use them where they exist; pair with `leave`.

    ContractError where groups of another layout exist.
    """
    process_group.join(rank_info, timeout_s)
    if _users and _users[0] != layout:
        process_group.leave()
        raise ContractError(f"megatron: found groups of {_users[0]}; expected {layout}, or none yet. Close the other trainer")
    if not _users:
        _initialize(layout, timeout_s)
    _users.append(layout)


def leave() -> None:
    """Give up one use; the last destroys the groups."""
    _users.pop()
    if not _users:
        _, *made = parallel_state._global_process_group_list  # after the default one, which is None here
        parallel_state.destroy_model_parallel()
        for group in made:
            if group in _world.pg_map:  # Megatron only forgets it, and its threads would live as long as the default group
                dist.destroy_process_group(group)
    process_group.leave()


def _initialize(layout: ParallelLayout, timeout_s: float) -> None:
    with _one_group_of_one():
        _make_groups(layout, timeout_s)
    model_parallel_cuda_manual_seed(0)  # nothing is drawn from it: weights are read and there is no dropout


def _make_groups(layout: ParallelLayout, timeout_s: float) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
    )


@contextmanager
def _one_group_of_one() -> Iterator[None]:
    """Let a rank make one group of itself alone, for every dimension of size 1. Each further one would be a context of gloo,
    with threads, a socket and entries in the store."""
    new_group, made = dist.new_group, {}

    def shared(ranks: Sequence[int] | None = None, *, backend: str | None = None, **options: Any) -> Any:
        if ranks is None or len(ranks) != 1:
            return new_group(ranks, backend=backend, **options)
        if dist.get_rank() not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        if backend not in made:
            # Named by its ranks, not counted: other ranks do not count it either.
            made[backend] = new_group(ranks, backend=backend, **{**options, "use_local_synchronization": True})
        return made[backend]

    dist.new_group = shared
    try:
        yield
    finally:
        dist.new_group = new_group


@frozen(kw_only=True, eq=False)
class Groups:
    """The groups that this rank is in."""

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    data: dist.ProcessGroup
    """Ranks that hold the same part of the model and other data."""
    pipeline: dist.ProcessGroup
    expert: dist.ProcessGroup
    expert_tensor: dist.ProcessGroup

    @classmethod
    def current(cls) -> "Groups":
        """Return the parallel state that `join` made."""
        state: Any = parallel_state
        return cls(
            tensor=state.get_tensor_model_parallel_group(),
            context=state.get_context_parallel_group(),
            data=state.get_data_parallel_group(),
            pipeline=state.get_pipeline_model_parallel_group(),
            expert=state.get_expert_model_parallel_group(),
            expert_tensor=state.get_expert_tensor_parallel_group(),
        )


def holders_of(parameter: Any) -> dist.ProcessGroup:
    """The ranks that hold the same of the model as this rank does in a parameter; those that add its gradients up."""
    state: Any = parallel_state
    if getattr(parameter, "allreduce", True):
        return state.get_data_parallel_group(with_context_parallel=True)
    return state.get_expert_data_parallel_group()


def share(parameters: Iterable[Tensor]) -> None:
    """Give all ranks that hold the same of a parameter what the first of them has read."""
    for parameter in parameters:
        holders = holders_of(parameter)
        if dist.get_world_size(holders) > 1:
            dist.broadcast(parameter.data, group=holders, group_src=0)


def is_last_stage() -> bool:
    """Return whether this rank holds the head of the model."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))

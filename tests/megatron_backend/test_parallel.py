"""Megatron's process groups are made for the first trainer of a process and go with its last."""

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _world

from rlcore.spi import ContractError, RankInfo
from rlcore_megatron.layouts import parallel
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.setup.cpu_shim import cuda_or_cpu

ONE = ParallelLayout()


def join(layout: ParallelLayout = ONE) -> None:
    with cuda_or_cpu("cpu"):
        parallel.join(RankInfo(), layout, 60.0)


def test_trainers_of_one_layout_share_the_groups() -> None:
    join()
    first = parallel.Groups.current()
    join()
    assert parallel.Groups.current().tensor is first.tensor
    parallel.leave()
    assert parallel_state.is_initialized()
    parallel.leave()
    assert not parallel_state.is_initialized()
    assert not dist.is_initialized()


def test_groups_of_another_layout_are_refused_and_those_there_stay() -> None:
    join()
    with pytest.raises(ContractError, match="groups of .*; expected .*virtual_pipeline=2"):
        join(ParallelLayout(virtual_pipeline=2))
    assert parallel_state.is_initialized()
    parallel.leave()
    assert not dist.is_initialized(), "the trainer that was refused left nothing behind"


def test_a_rank_alone_is_in_every_group_and_holds_the_head() -> None:
    join()
    groups = parallel.Groups.current()
    named = (groups.tensor, groups.context, groups.data, groups.pipeline, groups.expert, groups.expert_tensor)
    assert [group.size() for group in named] == [1] * 6
    assert parallel.is_last_stage()
    parallel.leave()


def test_dimensions_of_size_one_share_one_group() -> None:
    """Of each backend that Megatron asks for; the default group is another."""
    join()
    _, *made = parallel_state._global_process_group_list
    assert len(made) > len(set(made))
    assert len(set(made)) <= 2
    assert set(_world.pg_map) == {dist.group.WORLD, *made}
    parallel.leave()
    assert not _world.pg_map


def test_a_default_group_that_was_there_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        join()
        parallel.leave()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()

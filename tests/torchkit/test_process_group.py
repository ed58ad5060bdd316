"""Trainers of one process share a default group, which may be somebody else's."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from rlcore.spi import ContractError, RankSpec
from rlcore.torchkit import process_group

ONE = RankSpec()


@pytest.fixture
def others() -> Iterator[dist.ProcessGroup]:
    """A default group that was there before."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_last_to_leave_destroys_the_group() -> None:
    process_group.join(ONE, 60.0)
    process_group.join(ONE, 60.0)
    process_group.leave()
    assert dist.is_initialized()
    process_group.leave()
    assert not dist.is_initialized()


def test_a_group_that_was_there_stays(others: dist.ProcessGroup) -> None:
    process_group.join(ONE, 60.0)
    process_group.leave()
    assert dist.group.WORLD is others


@pytest.mark.usefixtures("others")
def test_a_group_of_another_size_is_refused() -> None:
    with pytest.raises(ContractError, match="found rank 0 of 1; expected rank 1 of 2, or none yet"):
        process_group.join(RankSpec(rank=1, world_size=2, rendezvous="env://"), 60.0)

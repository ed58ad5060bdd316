"""Pieces between processes, by gloo."""

from collections.abc import Sequence

import pytest
import torch
from attrs import define
from torch import Tensor

from rlcore.spi import RefitError, ShardSlice
from rlcore_torchkit.refit.shard_transfer import Bucket, ShardTransfer, make_bucket_list
from rlcore_torchkit.testing.ranks import free_address, launch

from .shard_transfer_ranks import CASES, NUM_RECEIVERS, NUM_SENDERS, run_rank  # type: ignore[import-not-found]
from .test_shard_plan import SPEC, WHOLE, plan_pieces, rows  # type: ignore[import-not-found]


def test_eight_ranks_to_four_in_every_pair_of_layouts() -> None:
    assert len(CASES) == 9
    launch(run_rank, (free_address(), free_address()), NUM_SENDERS + NUM_RECEIVERS)


@define
class Line:
    """A group of two ranks, of which one sends what the other receives later."""

    rank: int
    messages: list[Tensor]

    def exchange(self, sent: Sequence[tuple[int, Tensor]], received: Sequence[tuple[int, Tensor]]) -> None:
        self.messages += [message.clone() for _, message in sent]
        for (_, room), message in zip(received, self.messages, strict=bool(received)):
            room.copy_(message)

    def share(self, rooms: Sequence[tuple[tuple[int, ...], Tensor]]) -> None:
        assert not rooms


def transfer(buckets: Sequence[Bucket], group: Line) -> ShardTransfer:
    return ShardTransfer(buckets=buckets, num_senders=1, group=group, device=torch.device("cpu"))


def test_a_bucket_that_changed_is_not_taken() -> None:
    buckets = make_bucket_list((SPEC,), plan_pieces((SPEC,), [[WHOLE]], [[rows(2, 5)]], 10**6), 10**6)
    values, line = torch.randn(8, 6).bfloat16(), Line(0, [])
    sent = transfer(buckets, line).run({WHOLE: values}, {})
    [message] = line.messages
    taken = torch.zeros(3, 6).bfloat16()
    assert transfer(buckets, Line(1, [message])).run({}, {rows(2, 5): taken}).digest == sent.digest
    assert torch.equal(taken, values[2:5])
    for place in (0, len(message) - 1):
        wrong = message.clone()
        wrong[place] ^= 1
        untouched = torch.zeros(3, 6).bfloat16()
        with pytest.raises(RefitError, match="w from rank 0"):
            transfer(buckets, Line(1, [wrong])).run({}, {rows(2, 5): untouched})
        assert not untouched.any()


@pytest.mark.parametrize(
    ("max_piece_bytes", "num_pieces"),
    [(10**6, 1), (2 * 6 * 2, 3)],
    ids=["a view of the bucket", "of several pieces"],
)
def test_parts_that_are_not_there_are_made(max_piece_bytes: int, num_pieces: int) -> None:
    """Bytes between pieces are zero, so that equal values have equal digests."""
    pieces = plan_pieces((SPEC,), [[WHOLE]], [[rows(0, 5)]], max_piece_bytes)
    buckets = make_bucket_list((SPEC,), pieces, 10**6)
    values, line = torch.randn(8, 6, requires_grad=True), Line(0, [])
    assert len(pieces) == num_pieces
    digests = {transfer(buckets, line).run({WHOLE: values}, {}).digest for _ in range(3)}
    wanted: dict[ShardSlice, Tensor] = {}
    assert {transfer(buckets, Line(1, line.messages[:1])).run({}, wanted).digest} == digests
    assert torch.equal(wanted[rows(0, 5)], values[:5].detach().bfloat16())

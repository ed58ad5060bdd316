"""Which rank has which matrix whole: the same plan on all ranks, in rounds of a bounded size."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore_megatron.training import matrix_exchange
from rlcore_megatron.training.matrix_exchange import MatrixExchange
from rlcore_megatron.weights.element_runs import MatrixBlock


class PlayedGroup:
    """The ranks of a group, one after another in this process: what one sends is kept for the others."""

    def __init__(self, everyone: list[list[MatrixBlock]]) -> None:
        self.everyone, self.rank = everyone, 0

    def of(self, rank: int, most_elements: int) -> MatrixExchange:
        self.rank = rank

        def gather(found: list, blocks: object, group: object) -> None:
            assert group is self
            assert blocks == self.everyone[rank]
            found[:] = self.everyone

        played = SimpleNamespace(get_rank=lambda _: rank, get_world_size=lambda _: len(self.everyone), all_gather_object=gather)
        with mock.patch.object(matrix_exchange, "dist", played):
            return MatrixExchange(self.everyone[rank], self, most_elements)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    most_elements=st.integers(1, 40),
)
def test_every_block_is_sent_once_to_an_owner_that_holds_some_of_it(
    shapes: list[tuple[int, int]], cuts: list[int], most_elements: int
) -> None:
    bounds = [0, *sorted(cuts), 4]
    everyone = [
        [
            MatrixBlock(name=f"m{number}", shape=shape, rows=slice(low, min(high, shape[0])), columns=slice(0, shape[1]))
            for number, shape in enumerate(shapes)
            if low < min(high, shape[0])
        ]
        for low, high in itertools.pairwise(bounds)
    ]
    group = PlayedGroup(everyone)
    ranks = [group.of(rank, most_elements) for rank in range(len(everyone))]
    assert len({len(one.rounds) for one in ranks}) == 1
    owned: list[str] = []
    for number in range(len(ranks[0].rounds)):
        rounds = [one.rounds[number] for one in ranks]
        for receiver, found in enumerate(rounds):
            assert list(found.received) == [one.sent[receiver] for one in rounds]
            matrices = [blocks for of_shape in found.owned for blocks in of_shape]
            sizes = [blocks[0][1].shape[0] * blocks[0][1].shape[1] for blocks in matrices]
            assert sum(sizes) <= most_elements or len(sizes) == 1
            for blocks, size in zip(matrices, sizes, strict=True):
                assert sum(block.size for _, block in blocks) == size
                assert any(block.name == blocks[0][1].name for block in everyone[receiver])
                owned.append(blocks[0][1].name)
    assert sorted(owned) == sorted({block.name for blocks in everyone for block in blocks})
    for rank, one in enumerate(ranks):
        sent = [number for found in one.rounds for number in found.mine]
        assert sorted(sent) == list(range(len(everyone[rank])))


@pytest.mark.parametrize("transposed", [False, True])
def test_one_rank_alone_gets_its_own_matrices_back(transposed: bool) -> None:
    rows, columns = (slice(0, 3), slice(0, 2)) if not transposed else (slice(1, 6, 2), slice(0, 2))
    shape = (2, 6) if transposed else (3, 2)
    block = MatrixBlock(name="m", shape=shape, rows=rows, columns=columns, transposed=transposed)
    others = MatrixBlock(name="m", shape=shape, rows=slice(0, 6, 2), columns=columns, transposed=True)
    blocks = [block, others] if transposed else [block]
    exchange = PlayedGroup([blocks]).of(0, 100)
    parts = [torch.arange(6.0) + 10 * number for number in range(len(blocks))]
    (whole,) = ([],)

    def double(matrices: torch.Tensor) -> torch.Tensor:
        whole.append(matrices.clone())
        return 2 * matrices

    found = exchange.run(0, parts, torch.float32, double)
    assert all(torch.equal(one, 2 * part) for one, part in zip(found, parts, strict=True))
    assert torch.equal(block.taken(whole[0][0]).flatten(), parts[0])

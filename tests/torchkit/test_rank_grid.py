"""The numbers of a rank among those that share tokens and weights."""

from rlcore_torchkit.distributed.rank_grid import RankGrid


def test_tensor_ranks_are_neighbours_and_context_ranks_the_next() -> None:
    grids = [RankGrid(rank=rank, context=2, tensor=3) for rank in range(12)]
    assert [grid.tensor_rank for grid in grids] == [0, 1, 2] * 4
    assert [grid.context_rank for grid in grids] == [0, 0, 0, 1, 1, 1] * 2

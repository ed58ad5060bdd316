"""Every layout on gloo against plain transformers and torch in one process; the table is in megatron_layout_cases."""

from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_layout_cases import WORLD_SIZES, Launch, cases, prepare, run_all
from rank_launch import collected, launch_rows, once

from ..tiers import each_part

Results = list[dict[str, str]]
ROWS = [(num_ranks, name) for num_ranks in WORLD_SIZES for name in cases(num_ranks)]
FOUR_RANKS = (
    "tp2xpp2/gemma2/packed",
    "tp4/qwen2/packed",
    "tp2xep2/glm4_moe/packed",
    "pp2xdp2/mixed/auxiliary",
)
"""Layouts that need more than two ranks: two dimensions at a time, and ranks that share a key head."""
KEPT = {*each_part([name for num_ranks, name in ROWS if num_ranks < 4]), *FOUR_RANKS}
"""Each layout of fewer than four ranks, each family and each form once."""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""
    root: Path = tmp_path_factory.mktemp("megatron-layouts")
    prepare(root)

    @once
    def get(num_ranks: int) -> Results:
        names = tuple(case["name"] for case in collected(request, "test_layout") if case["num_ranks"] == num_ranks)
        given = Launch(num_ranks=num_ranks, root=root, names=names)
        return launch_rows(run_all, (given,), [given.results(rank) for rank in range(num_ranks)])

    return get


@pytest.mark.wide(keep=[f"{num_ranks}-{name}" for num_ranks, name in ROWS if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), ROWS)
def test_layout(num_ranks: int, name: str, results: Callable[[int], Results]) -> None:
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())

"""Models of images in every layout on gloo, against transformers on one sequence at a time; the table is in
megatron_image_cases."""

from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_image_cases import ROWS, WORLD_SIZES, Launch, prepare, run_all
from rank_launch import collected, launch_rows, once

Results = list[dict[str, str]]
CASES = [(row.num_ranks, row.name) for row in ROWS]
KEPT = ("one+recompute/qwen3_vl", "tp2+sp/qwen3_vl", "pp2+frozen/qwen3_vl", "pp2xvpp2/qwen2_5_vl", "dp2/qwen3_vl", "cp2/qwen2_vl")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("megatron-images")
    prepare(path)
    return path


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], Results]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""

    @once
    def get(num_ranks: int) -> Results:
        names = tuple(case["name"] for case in collected(request, "test_layout") if case["num_ranks"] == num_ranks)
        given = Launch(num_ranks=num_ranks, root=root, names=names)
        return launch_rows(run_all, (given,), [given.results(rank) for rank in range(num_ranks)])

    return get


@pytest.mark.wide(keep=[f"{num_ranks}-{name}" for num_ranks, name in CASES if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), CASES)
def test_layout(num_ranks: int, name: str, results: Callable[[int], Results]) -> None:
    assert num_ranks in WORLD_SIZES
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())

"""Every layout on gloo against plain transformers and torch in one process; the table is in megatron_layout_cases."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_layout_cases import WORLD_SIZES, Launch, cases, prepare, run_all
from rank_launch import launch, once

Results = list[dict[str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """What went wrong on each rank, of a number of ranks that is launched once."""
    root: Path = tmp_path_factory.mktemp("megatron-layouts")
    prepare(root)

    @once
    def get(num_ranks: int) -> Results:
        given = Launch(num_ranks=num_ranks, root=root)
        launch(run_all, (given,), num_ranks)
        return [json.loads(given.results(rank).read_text()) for rank in range(num_ranks)]

    return get


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "name"), [(size, name) for size in WORLD_SIZES for name in cases(size)])
def test_layout(num_ranks: int, name: str, results: Callable[[int], Results]) -> None:
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())

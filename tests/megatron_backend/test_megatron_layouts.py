"""Every layout on gloo against plain transformers and torch in one process; the table is in megatron_layout_cases."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from megatron_layout_cases import WORLD_SIZES, Launch, cases, prepare, run_all

Results = list[dict[str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """What went wrong on each rank, of a number of ranks that is launched once."""
    root: Path = tmp_path_factory.mktemp("megatron-layouts")
    prepare(root)

    @cache
    def get(num_ranks: int) -> Results:
        launch = Launch(num_ranks=num_ranks, root=root)
        # Imports take seconds: one process does them, of which the ranks are forks.
        torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["megatron_layout_cases"])
        torch.multiprocessing.start_processes(run_all, (launch,), nprocs=num_ranks, start_method="forkserver")
        return [json.loads(launch.results(rank).read_text()) for rank in range(num_ranks)]

    return get


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_ranks", "name"), [(size, name) for size in WORLD_SIZES for name in cases(size)])
def test_layout(num_ranks: int, name: str, results: Callable[[int], Results]) -> None:
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())

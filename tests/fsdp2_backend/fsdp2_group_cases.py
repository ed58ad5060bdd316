"""Launch ranks on gloo, once for each number of them and each module of cases."""

import importlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import frozen
from hypothesis import settings
from rank_launch import launch_rows, once, run_rows
from torch import Tensor

from rlcore.spi import RankInfo
from rlcore_torchkit.distributed import process_group
from rlcore_torchkit.testing.models import make_model

ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe")
WORLD_SIZES = (2, 4)
TOLERANCE = 1e-6
quickly = settings(max_examples=8, deadline=None, derandomize=True, database=None)


@frozen(kw_only=True)
class Place:
    """Where a case runs."""

    rank: int
    num_ranks: int
    models: Path

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


class Cases(dict[str, Callable[[Place], None]]):
    """Functions that every rank calls, by their names."""

    def add(self, function: Callable[[Place], None]) -> Callable[[Place], None]:
        self[function.__name__] = function
        return function


def assert_close_everywhere(pairs: list[tuple[str, Tensor, Tensor]], tolerance: float = TOLERANCE) -> None:
    """Found and expected; all ranks fail if one does, so that hypothesis draws the same examples on each."""
    errors = [_error(found.detach().float(), expected.detach().float()) for _, found, expected in pairs]
    worst = torch.stack(errors)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    wrong = {name: error for (name, _, _), error in zip(pairs, worst.tolist(), strict=True) if not error <= tolerance}
    assert wrong == {}


def _error(found: Tensor, expected: Tensor) -> Tensor:
    """Relative to the largest entry, where that is above 1."""
    assert found.shape == expected.shape
    if not found.numel():
        return torch.tensor(0.0)
    return (found - expected).abs().max() / max(1.0, expected.abs().max())


@contextmanager
def on_cuda() -> Iterator[None]:
    """A group of one rank on NCCL."""
    process_group.join(RankInfo(device="cuda"), 60.0)
    try:
        yield
    finally:
        process_group.leave()


@once
def results_of(num_ranks: int, module: str) -> list[dict[str, str]]:
    """Return each rank's failures in the cases of a module, by their names; empty where a case passes."""
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        for architecture in ARCHITECTURES:
            make_model(scratch / architecture, architecture, num_heads=4, num_kv_heads=2)
        return launch_rows(
            run_all, (num_ranks, module, scratch), [scratch / f"results-{rank}.json" for rank in range(num_ranks)]
        )


def run_all(rank: int, num_ranks: int, module: str, scratch: Path) -> None:
    """Run all cases of a module."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/rendezvous", rank=rank, world_size=num_ranks)
    cases = importlib.import_module(module).CASES
    place = Place(rank=rank, num_ranks=num_ranks, models=scratch)
    run_rows({name: partial(function, place) for name, function in cases.items()}, scratch / f"results-{rank}.json")
    dist.destroy_process_group()

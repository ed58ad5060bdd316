"""Models of images on GPUs, with TransformerEngine in bfloat16 where it is installed, against one process in float32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron_image_cases import ROWS, Launch, prepare, run_all
from rank_launch import launch_rows, once

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
Results = list[dict[str, str]]


def on_devices(num_ranks: int) -> pytest.MarkDecorator:
    found = torch.cuda.device_count()
    return pytest.mark.skipif(num_ranks > found, reason=f"needs {num_ranks} CUDA device(s), found {found}")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Results]:
    """What went wrong on each rank, of a number of ranks and a dtype that are launched once."""
    root: Path = tmp_path_factory.mktemp("megatron-images-gpu")
    prepare(root)

    @once
    def get(num_ranks: int, dtype: str) -> Results:
        names = tuple(row.name for row in ROWS if row.num_ranks == num_ranks)
        given = Launch(num_ranks=num_ranks, root=root, device="cuda", dtype=dtype, names=names)
        return launch_rows(run_all, (given,), [given.results(rank) for rank in range(num_ranks)])

    return get


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_ranks", "name"), [pytest.param(row.num_ranks, row.name, marks=on_devices(row.num_ranks)) for row in ROWS]
)
def test_layout_on_gpus(num_ranks: int, name: str, dtype: str, results: Callable[[int, str], Results]) -> None:
    wrong = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks, dtype)) if result[name]}
    assert wrong == {}, "\n".join(wrong.values())

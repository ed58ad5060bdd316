"""The table of megatron_layout_cases on GPUs, with TransformerEngine where it is installed, against one process in float32.

In float32, to the last digits, and in bfloat16, with attention's fused kernels.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from megatron_layout_cases import WORLD_SIZES, Launch, cases, prepare, run_all
from rank_launch import launch_rows, once

from rlcore_megatron.setup.requirements import missing_delta_kernels

NUM_DEVICES = torch.cuda.device_count()
ENOUGH = {
    num_ranks: pytest.mark.skipif(num_ranks > NUM_DEVICES, reason=f"needs {num_ranks} CUDA device(s), found {NUM_DEVICES}")
    for num_ranks in WORLD_SIZES
}
DELTA_NETS = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
Results = list[dict[str, str]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], Results]:
    """What went wrong on each rank, of a number of ranks and a dtype that are launched once."""
    root: Path = tmp_path_factory.mktemp("megatron-layouts-gpu")
    prepare(root, hidden_size=128)  # head dimension 32, which flash attention takes

    @once
    def get(num_ranks: int, dtype: str) -> Results:
        engine = find_spec("transformer_engine") is not None
        given = Launch(num_ranks=num_ranks, root=root, device="cuda", dtype=dtype, engine=engine)
        return launch_rows(run_all, (given,), [given.results(rank) for rank in range(num_ranks)])

    return get


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_ranks", "name"), [pytest.param(num, name, marks=ENOUGH[num]) for num in WORLD_SIZES for name in cases(num)]
)
def test_layout_on_gpus(num_ranks: int, name: str, dtype: str, results: Callable[[int, str], Results]) -> None:
    missing = missing_delta_kernels()
    if missing is not None and name.split("/")[1] in DELTA_NETS:
        pytest.skip(missing)
    wrong = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks, dtype)) if result[name]}
    assert wrong == {}, "\n".join(wrong.values())

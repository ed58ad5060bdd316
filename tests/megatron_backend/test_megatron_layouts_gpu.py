"""The table of megatron_layout_cases on GPUs, in bfloat16, within its own bounds of float32 in one process.

With TransformerEngine where it is installed.
"""

import json
from pathlib import Path

import pytest
import torch
from megatron_layout_cases import WORLD_SIZES, cases, prepare, run_all

NUM_DEVICES = torch.cuda.device_count()
ENOUGH = {
    num_ranks: pytest.mark.skipif(num_ranks > NUM_DEVICES, reason=f"needs {num_ranks} CUDA device(s), found {NUM_DEVICES}")
    for num_ranks in WORLD_SIZES
}
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, str]]]:
    """What went wrong on each rank, by the number of ranks; all that the devices suffice for are launched, once."""
    root: Path = tmp_path_factory.mktemp("megatron-layouts-gpu")
    prepare(root, hidden_size=128)  # head dimension 32, which flash attention takes
    found = {}
    for num_ranks in (size for size in WORLD_SIZES if size <= NUM_DEVICES):
        torch.multiprocessing.spawn(run_all, args=(num_ranks, root, "cuda", "bfloat16"), nprocs=num_ranks)
        files = [root / f"results-{num_ranks}-{rank}.json" for rank in range(num_ranks)]
        found[num_ranks] = [json.loads(file.read_text()) for file in files]
    return found


@pytest.mark.parametrize(
    ("num_ranks", "name"), [pytest.param(num, name, marks=ENOUGH[num]) for num in WORLD_SIZES for name in cases(num)]
)
def test_layout_on_gpus(num_ranks: int, name: str, results: dict[int, list[dict[str, str]]]) -> None:
    wrong = {f"rank {rank}": result[name] for rank, result in enumerate(results[num_ranks]) if result[name]}
    assert wrong == {}, "\n".join(wrong.values())

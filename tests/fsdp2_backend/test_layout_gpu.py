"""The table of fsdp2_layout_cases on GPUs, in bfloat16, within its own bounds of float32 in one process."""

from pathlib import Path

import pytest
import torch
from fsdp2_layout_cases import cases, prepare, run_all
from rank_launch import launch_rows

NUM_DEVICES = torch.cuda.device_count()
ENOUGH = {
    num_ranks: pytest.mark.skipif(num_ranks > NUM_DEVICES, reason=f"needs {num_ranks} CUDA devices, found {NUM_DEVICES}")
    for num_ranks in (2, 4)
}
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts-gpu")
    prepare(root, hidden_size=128)  # head dimension 32, which flash attention takes
    return root


@pytest.fixture(scope="module")
def results(root: Path) -> dict[int, list[dict[str, str]]]:
    """What went wrong on each rank, by the number of ranks; all that the devices suffice for are launched, once."""
    found = {}
    for num_ranks in (2, 4):
        if num_ranks <= NUM_DEVICES:
            files = [root / f"results-{num_ranks}-{rank}.json" for rank in range(num_ranks)]
            found[num_ranks] = launch_rows(run_all, (num_ranks, root, "cuda", "bfloat16"), files)
    return found


@pytest.mark.parametrize(
    ("num_ranks", "name"), [pytest.param(num, name, marks=ENOUGH[num]) for num in (2, 4) for name in cases(num, "cuda")]
)
def test_layout_on_gpus(num_ranks, name, results):
    wrong = {f"rank {rank}": result[name] for rank, result in enumerate(results[num_ranks]) if result[name]}
    assert wrong == {}, "\n".join(wrong.values())

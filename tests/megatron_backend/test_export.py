"""Weights in every layout, on gloo or on GPUs: loaded, exported, converted; the table is in megatron_weights_cases."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron_weights_cases import CASES, IMAGES, MODELS, prepare, rows, run_all
from rank_launch import collected, launch_rows, once

from ..tiers import each_part

Results = list[dict[str, str]]
TRIPS = {size: [f"{case.name}/{model}" for case in CASES[size] for model in case.models] for size in CASES}
"""Rows of a layout and a model."""
FOUR_RANKS = ("tp2xpp2/qwen2", "tp2xep2xetp2/glm4_moe", "tp4/one_key_head")
READ_AND_CONVERTED = [name for name in rows(2) if name not in TRIPS[2] and name.endswith(("/llama", "/qwen3_moe"))]
FAMILIES = (*MODELS, *IMAGES, "deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa")
"""Families that meet the layouts of two ranks. test_layout.py exports what it has trained of all others."""
TWO_RANKS = each_part([name for name in TRIPS[2] if name.rpartition("/")[2] in FAMILIES])
KEPT = [*(f"2-{name}" for name in (*TWO_RANKS, *READ_AND_CONVERTED)), *(f"4-{name}" for name in FOUR_RANKS)]
"""Each layout of two ranks, and how files of families with and without experts are read and converted."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron-weights")
    prepare(root)
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], Results]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""

    @once
    def get(num_ranks: int) -> Results:
        names = {case["name"] for case in collected(request, "test_weights") if case["num_ranks"] == num_ranks}
        names |= {name.replace("reads of a conversion/", "converted/") for name in names}
        files = [root / f"results-{num_ranks}-{rank}.json" for rank in range(num_ranks)]
        return launch_rows(run_all, (num_ranks, root, names), files)

    return get


def on_devices(num_ranks: int) -> tuple[pytest.MarkDecorator, ...]:
    """Where there are GPUs, each rank takes one."""
    devices = torch.cuda.device_count()
    if not devices:
        return ()
    return pytest.mark.gpu, pytest.mark.skipif(devices < num_ranks, reason=f"needs {num_ranks} CUDA devices, found {devices}")


@pytest.mark.wide(keep=KEPT)
@pytest.mark.parametrize(
    ("num_ranks", "name"), [pytest.param(size, name, marks=on_devices(size)) for size in CASES for name in rows(size)]
)
def test_weights(num_ranks: int, name: str, results: Callable[[int], Results]) -> None:
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())

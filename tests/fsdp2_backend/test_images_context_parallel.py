"""Models of images over context ranks on gloo; what each rank does is in fsdp2_image_cases."""

from pathlib import Path

import pytest
from fsdp2_image_cases import CASES, FAMILIES, run_all
from rank_launch import collected, launch_rows, once

from rlcore_torchkit.testing.image_models import make_image_model

WORLD_SIZES = (2, 4)
"""Context ranks alone, and with data-parallel ones."""
KEPT = ["cp/qwen2_vl-4", "cp/qwen2_5_vl-2", "cp+checkpointing/qwen3_vl-2", "cp+frozen/qwen3_vl-2"]
"""Each family, each option and each number of ranks once."""


@pytest.fixture(scope="module")
def results_of(request, tmp_path_factory):
    """Return a function that launches a number of ranks once, and returns each rank's failures."""
    root = tmp_path_factory.mktemp("image-context")
    for family in FAMILIES:
        make_image_model(root / "models" / family, family)

    @once
    def get(num_ranks: int) -> list[dict[str, str]]:
        scratch: Path = root / str(num_ranks)
        scratch.mkdir()
        names = {case["name"] for case in collected(request, "test_context_ranks") if case["num_ranks"] == num_ranks}
        files = [scratch / f"results-{rank}.json" for rank in range(num_ranks)]
        return launch_rows(run_all, (num_ranks, root / "models", scratch, names), files)

    return get


@pytest.mark.wide(keep=KEPT)
@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_context_ranks(name, num_ranks, results_of):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results_of(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())

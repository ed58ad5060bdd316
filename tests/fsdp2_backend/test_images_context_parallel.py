"""Models of images over context ranks on gloo; what each rank does is in fsdp2_image_cases."""

from pathlib import Path

import pytest
from fsdp2_image_cases import CASES, FAMILIES, run_all
from rank_launch import launch_rows, once

from rlcore_torchkit.testing.image_models import make_image_model

WORLD_SIZES = (2, 4)
"""Context ranks alone, and with data-parallel ones."""


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """A function from a number of ranks to what went wrong on each; each number is launched once."""
    root = tmp_path_factory.mktemp("image-context")
    for family in FAMILIES:
        make_image_model(root / "models" / family, family)

    @once
    def get(num_ranks: int) -> list[dict[str, str]]:
        scratch: Path = root / str(num_ranks)
        scratch.mkdir()
        files = [scratch / f"results-{rank}.json" for rank in range(num_ranks)]
        return launch_rows(run_all, (num_ranks, root / "models", scratch), files)

    return get


@pytest.mark.parametrize("num_ranks", WORLD_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_context_ranks(name, num_ranks, results_of):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results_of(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())

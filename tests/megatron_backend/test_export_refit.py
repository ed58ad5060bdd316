"""vLLM's engines, of one rank and of two, take the weights of several ranks of Megatron, as megatron_refit_cases has it."""

import pytest

pytest.importorskip("vllm")

from megatron_refit_cases import CASES, NUM_RANKS, prepare, run_all
from rank_launch import collected, launch_rows


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What went wrong on each rank."""
    root = tmp_path_factory.mktemp("megatron-refit")
    prepare(root)
    names = [case["name"] for case in collected(request, "test_both_sides_agree_after_each_step")]
    return launch_rows(run_all, (root, names), [root / f"results-{rank}.json" for rank in range(NUM_RANKS)])


@pytest.mark.wide(keep=["ep2xpp2"])
@pytest.mark.parametrize("name", CASES)
def test_both_sides_agree_after_each_step(name: str, results: list[dict[str, str]]) -> None:
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results) if result[name]}
    assert found == {}, "\n".join(found.values())

"""`[optimizer]` in every layout on gloo against torch's own optimizers; the table is in megatron_optimizer_cases."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from megatron_optimizer_cases import WORLD_SIZES, Launch, expectation, rows, run_all
from optimizer_reference import LEAST_8BIT, exact_orthogonalized
from rank_launch import collected, launch_rows, once
from torch.optim import _muon

from rlcore_torchkit.optimizer import muon, settings

Results = list[dict[str, str]]
ROWS = [(num_ranks, name) for num_ranks in WORLD_SIZES for name in rows(num_ranks)]
KEPT = (
    "one/qwen2/muon",
    "one/qwen3_moe/mixed",
    "one/gpt_oss/muon",
    "one/qwen2/mixed-bfloat16",
    "one/qwen2/groups-bfloat16",
    "dp2/qwen2/mixed",
    "dp2/qwen2/mixed-bfloat16",
    "tp2/qwen2/8bit",
    "tp2/qwen3_5_text/muon",
    "ep2/qwen3_moe/muon",
    "pp2/qwen3_moe/mixed",
    "tp4/qwen2/mixed",
    "tp2xep2/qwen3_moe/mixed",
)
"""One process, each dimension that divides matrices, and ranks that share a key head."""


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """`use_exact_iterations`, for the tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "LEAST_8BIT", LEAST_8BIT)
        patch.setattr(muon, "PRECISION", muon.torch.float64)
        patch.setattr(_muon, "_zeropower_via_newtonschulz", exact_orthogonalized)
        yield


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Results]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""
    root: Path = tmp_path_factory.mktemp("megatron-optimizers")

    @once
    def get(num_ranks: int) -> Results:
        names = tuple(case["name"] for case in collected(request, "test_steps_are_torchs") if case["num_ranks"] == num_ranks)
        for name in names:
            _, architecture, kind = rows(num_ranks)[name]
            expectation(root, architecture, kind)
        given = Launch(num_ranks=num_ranks, root=root, names=names)
        return launch_rows(run_all, (given,), [given.results(rank) for rank in range(num_ranks)])

    return get


@pytest.mark.wide(keep=[f"{num_ranks}-{name}" for num_ranks, name in ROWS if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), ROWS)
def test_steps_are_torchs(num_ranks: int, name: str, results: Callable[[int], Results]) -> None:
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())

"""Muon, moments in 8 bits and groups in every layout on gloo against torch's and torchao's optimizers over whole tensors."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fsdp2_optimizer_cases import (
    NUM_STEPS,
    SAVE_AFTER,
    assert_like_reference,
    cases,
    prepare,
    run_all,
    saved_at,
    spec_of,
    step,
    with_sources,
)
from fsdp2_support import exported, make_backend
from optimizer_reference import LEAST_8BIT, exact_orthogonalized
from rank_launch import collected, launch_rows, once
from torch.optim import _muon

from rlcore.spi import CloseRequest, LoadStateRequest
from rlcore_torchkit.optimizer import muon, settings

from ..tiers import each_part

ROWS = [(num_ranks, name) for num_ranks in (2, 4) for name in cases(num_ranks)]
FOUR_RANKS = (
    "hsdp2x2/qwen3_moe/muon",
    "dp2xtp2/qwen3/muon",
    "tp4/qwen3/muon+8bit",
    "tp2xep2/qwen3_moe/8bit",
)
"""Layouts that need more than two ranks: two dimensions at a time, replicas, and ranks that share a key head."""
KEPT = {
    *each_part([name for name in cases(2) if name.startswith("parity/")]),
    "resume/tp2-from-dp2/qwen3/muon+8bit",
    "resume/ep2-from-tp2/qwen3_moe/muon+8bit",
    *(f"parity/{name}" for name in FOUR_RANKS),
}
"""Each layout of two ranks, each family and each optimizer once; dense and divided experts resumed."""


@pytest.fixture(scope="module", autouse=True)
def exact():
    """`use_exact_iterations`, for the tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "LEAST_8BIT", LEAST_8BIT)
        patch.setattr(muon, "PRECISION", muon.torch.float64)
        patch.setattr(_muon, "_zeropower_via_newtonschulz", exact_orthogonalized)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("optimizers")
    prepare(root)
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], list[dict[str, str]]]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""
    names = {case["name"] for case in collected(request, "test_layout")}
    names |= {
        f"parity/{case['layout']}/{case['architecture']}/muon+8bit"
        for case in collected(request, "test_one_process_resumes_any_layout")
    }

    @once
    def get(num_ranks: int) -> list[dict[str, str]]:
        files = [root / f"results-{num_ranks}-{rank}.json" for rank in range(num_ranks)]
        return launch_rows(run_all, (num_ranks, root, with_sources(num_ranks, names)), files)

    return get


@pytest.mark.wide(keep=[f"{num_ranks}-{name}" for num_ranks, name in ROWS if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), ROWS)
def test_layout(num_ranks, name, results):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())


@pytest.mark.wide(keep=["tp2-qwen3"])
@pytest.mark.parametrize(("layout", "architecture"), [("tp2", "qwen3"), ("ep2", "qwen3_moe"), ("hsdp2x2", "qwen3_moe")])
def test_one_process_resumes_any_layout(layout, architecture, root, results):
    results(4 if "x" in layout else 2)
    backend = make_backend(root / "models" / architecture, optimizer=spec_of("muon+8bit", architecture))
    directory = saved_at(root, layout, architecture, "muon+8bit")
    assert backend.load_state(LoadStateRequest(directory=directory)).weight_version == SAVE_AFTER
    step(backend, SAVE_AFTER)
    assert_like_reference(exported(backend, NUM_STEPS), root, architecture, "muon+8bit")
    backend.close(CloseRequest())

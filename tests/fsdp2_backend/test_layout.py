"""Every layout on gloo against plain transformers and torch in one process; the table is in fsdp2_layout_cases."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsdp2_layout_cases import (
    NUM_STEPS,
    OPTIMIZER,
    SAVE_AFTER,
    assert_weights,
    cases,
    prepare,
    run_all,
    saved_at,
    train_on_one,
    with_sources,
)
from fsdp2_support import exported, make_backend
from rank_launch import collected, launch_rows, once

from rlcore.spi import CloseRequest, LoadStateRequest

from ..tiers import each_part

Results = list[dict[str, str]]
SIZES = (2, 4)
ROWS = [(num_ranks, name) for num_ranks in SIZES for name in cases(num_ranks)]
RESUMED = ("resume/dp2-from-single/qwen3_moe", "resume/tp2+sp-from-tp2/qwen3", "resume/dp2xtp2+every-from-tp2/qwen3")
"""From one process, from another layout of as many ranks, and from one of fewer."""
FOUR_RANKS = (
    "hsdp2x2/qwen3_moe",
    "dp2xtp2+every/qwen3",
    "tp4/qwen2",
    "tp2xep2+checkpointing/qwen3_moe",
)
"""Layouts that need more than two ranks: two dimensions at a time, and ranks that share a key head."""
KEPT = {
    *each_part([name for name in cases(2) if name.startswith("parity/")]),
    *(f"parity/{name}/packed" for name in FOUR_RANKS),
    *RESUMED,
}
"""Each layout of two ranks, and each family and form, once; each kind of resumption."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    prepare(root)
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], Results]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""
    names = {case["name"] for case in collected(request, "test_layout")}
    names |= {
        f"parity/{case['layout']}/{case['architecture']}/packed"
        for case in collected(request, "test_one_process_resumes_any_layout")
    }
    for num_ranks in SIZES:
        names = with_sources(num_ranks, names)

    @once
    def get(num_ranks: int) -> Results:
        if num_ranks == 4:
            get(2)  # its checkpoints are resumed
        files = [root / f"results-{num_ranks}-{rank}.json" for rank in range(num_ranks)]
        return launch_rows(run_all, (num_ranks, root, "cpu", "float32", names), files)

    return get


@pytest.mark.wide(keep=[f"{num_ranks}-{name}" for num_ranks, name in ROWS if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), ROWS)
def test_layout(num_ranks, name, results):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())


@pytest.mark.wide(keep=["tp2+sp-qwen3"])
@pytest.mark.parametrize(
    ("layout", "architecture"),
    [
        ("tp2+sp", "qwen3"),
        ("dp2xtp2", "qwen3"),
        ("tp2xcp2", "qwen3_moe"),
        ("hsdp2x2", "qwen3_moe"),
        ("hsdp2xtp2", "qwen3"),
        ("dp2xep2", "qwen3_moe"),
    ],
)
def test_one_process_resumes_any_layout(layout, architecture, root, results):
    results(2 if f"parity/{layout}/{architecture}/packed" in cases(2) else 4)
    directory = saved_at(root, layout, architecture)
    backend = make_backend(root / "models" / architecture, optimizer=OPTIMIZER)
    assert backend.load_state(LoadStateRequest(directory=directory)).weight_version == SAVE_AFTER
    train_on_one(backend, SAVE_AFTER)
    assert_weights(exported(backend, NUM_STEPS), torch.load(root / f"{architecture}.pt")["weights"])
    backend.close(CloseRequest())

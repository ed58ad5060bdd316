"""Adapters in every layout against plain transformers in float64."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from attrs import evolve
from fsdp2_lora_cases import DROPOUT, trained
from lora_cases import SAVE_AFTER, assert_reference_is_the_beginning, cases, prepare, prepare_adapters, results_of
from lora_support import BATCHES, SPEC, assert_adapters, lora_context, saved_adapters
from megatron_families import WITH_ADAPTERS, make_own
from megatron_lora_cases import LAYOUTS, make, run_all
from megatron_support import split, step_request
from rank_launch import collected
from safetensors.torch import load_file, save_file

from rlcore.spi import CheckpointError, CloseRequest, ConfigError, LoadStateRequest, SaveStateRequest
from rlcore_megatron.checkpoints.checkpoint_check import read_metadata
from rlcore_megatron.checkpoints.distributed_weights import stored_shapes

from ..tiers import each_part

RESUMED = {"pp2/qwen3", "tp2+sp/qwen3", "tp2xpp2/qwen3"}
"""Layouts whose checkpoints one process resumes."""
KEPT = {*each_part([name for num_ranks, name in cases(LAYOUTS) if num_ranks < 4]), "pp2/qwen3", "tp2+sp/qwen3"}
"""Each layout of fewer than four ranks and each family once."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    prepare(root)
    for name in WITH_ADAPTERS:
        make_own(root / "models" / name, name, num_hidden_layers=2)
        prepare_adapters(root, name)
    for name in ("qwen3", "deepseek_v3"):
        dropping = trained(root, name, dropout=DROPOUT)  # of the other trainer
        save_file(saved_adapters(dropping, root / f"{name}-dropping"), root / f"{name}-dropout.safetensors")
        dropping.close(CloseRequest())
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], list[dict[str, str]]]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""
    names = {case["name"] for case in collected(request, "test_layouts_equal_plain_transformers")} | RESUMED
    return results_of(root, run_all, names)


@pytest.mark.wide(keep=[f"{number}-{name}" for number, name in cases(LAYOUTS) if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), cases(LAYOUTS))
def test_layouts_equal_plain_transformers(num_ranks, name, results):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())


@pytest.mark.wide(keep=["tp2+sp", "pp2"])
@pytest.mark.parametrize("layout", ["tp2+sp", "pp2", "tp2xpp2"])
def test_one_process_resumes_a_layout(layout, root, results, tmp_path):
    """Adapters and their moments alone, which any layout reads."""
    results(4 if layout == "tp2xpp2" else 2)
    backend = make(lora_context(root / "models" / "qwen3", SPEC, needs_reference=True), {})
    try:
        directory = root / f"{layout}-qwen3" / "resume"
        assert backend.load_state(LoadStateRequest(directory=directory)).weight_version == SAVE_AFTER
        assert_reference_is_the_beginning(root, backend, SAVE_AFTER)
        batch = BATCHES[SAVE_AFTER]
        backend.train_step(step_request(split(batch, [[0], [1, 2, 3, 4, 5, 6, 7]]), batch.counts(), SAVE_AFTER))
        assert_adapters(saved_adapters(backend, tmp_path / "peft"), load_file(root / "qwen3.safetensors"))
    finally:
        backend.close(CloseRequest())


@pytest.mark.wide(keep=["tp2+sp"])
@pytest.mark.parametrize("layout", ["tp2+sp", "tp2xpp2"])
def test_checkpoints_hold_adapters_alone(layout, root, results):
    """Whole ones by name, and their two moments; of nothing else."""
    results(4 if layout == "tp2xpp2" else 2)
    stored = stored_shapes(read_metadata(root / f"{layout}-qwen3" / "resume" / "state"))
    adapters = {
        name.removeprefix("base_model.model."): tensor for name, tensor in load_file(root / "qwen3.safetensors").items()
    }
    expected = {
        f"{prefix}{name}": tuple(tensor.shape)
        for name, tensor in adapters.items()
        for prefix in ("", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.")
    }
    assert stored == expected


def test_other_adapters_are_refused(root, tmp_path):
    backend = make(lora_context(root / "models" / "qwen3", SPEC), {})
    backend.save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
    backend.close(CloseRequest())
    other = make(lora_context(root / "models" / "qwen3", evolve(SPEC, rank=4)), {})
    with pytest.raises(CheckpointError, match="another model"):
        other.load_state(LoadStateRequest(directory=tmp_path))
    other.close(CloseRequest())


def test_target_that_is_no_layer_is_refused(root):
    """As `check` does where it can see the model."""
    with pytest.raises(ConfigError, match='"gate_proj"'):
        make(lora_context(root / "models" / "qwen3_moe", evolve(SPEC, targets=("q_proj", "gate_proj"))), {})
    assert not dist.is_initialized(), "what is not built leaves nothing behind"

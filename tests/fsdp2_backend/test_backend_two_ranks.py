"""Two ranks on gloo against plain transformers and torch on one; the cases are in fsdp2_two_rank_cases."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp2_support import assert_same, exported, make_backend, make_batch, step_request
from fsdp2_two_rank_cases import CASES, WORLD_SIZE, run_all
from rank_launch import launch_rows

from rlcore.spi import CloseRequest, ContractError, LoadStateRequest, SaveStateRequest
from rlcore_torchkit.architectures.registry import installed_model_types
from rlcore_torchkit.testing.models import make_model

ARCHITECTURES = installed_model_types()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two ranks left their results; they are launched once."""
    root = tmp_path_factory.mktemp("two-ranks")
    for architecture in ARCHITECTURES:
        make_model(root / "models" / architecture, architecture, tied=architecture in ("qwen2", "qwen3"))
    (root / "scratch").mkdir()
    save_on_one(root / "models" / "qwen3_moe", root / "scratch")
    launch_rows(run_all, (root / "models", root / "scratch"), [results_file(root, rank) for rank in range(WORLD_SIZE)])
    return root


def results_file(root: Path, rank: int) -> Path:
    return root / "scratch" / f"results-{rank}.json"


def save_on_one(model: Path, scratch: Path) -> None:
    trainer, batch = make_backend(model), make_batch()
    trainer.train_step(step_request([batch], batch.counts()))
    directory = scratch / "saved-on-one"
    directory.mkdir()
    trainer.save_state(SaveStateRequest(directory=directory, kind="resume"))
    trainer.train_step(step_request([batch], batch.counts(), 1))
    np.savez(scratch / "saved-on-one-next.npz", **{name: tensor.numpy() for name, tensor in exported(trainer, 2).items()})
    trainer.close(CloseRequest())


@pytest.mark.parametrize("name", CASES)
def test_two_ranks(name, scratch):
    for rank in range(WORLD_SIZE):
        result = json.loads(results_file(scratch, rank).read_text())[name]
        assert result == "", f"rank {rank}:\n{result}"


def test_one_rank_loads_what_two_saved(scratch, backend):
    trainer, batch = backend(scratch / "models" / "qwen3_moe"), make_batch()
    directory = scratch / "scratch" / "saved-on-two"
    assert trainer.load_state(LoadStateRequest(directory=directory)).weight_version == 1
    trainer.train_step(step_request([batch], batch.counts(), 1))
    with np.load(scratch / "scratch" / "saved-on-two-next.npz") as expected:
        assert_same(exported(trainer, 2), {name: torch.from_numpy(expected[name]) for name in expected}, 1e-6)


def test_several_ranks_need_a_rendezvous(model_directory):
    with pytest.raises(ContractError, match="rendezvous: found None with 2 ranks"):
        make_backend(model_directory(), rank=0, world_size=2)


def test_existing_process_group_of_another_size_is_refused_and_kept(model_directory):
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ContractError, match="rank 0 of 1; .* rank 1 of 2"):
            make_backend(model_directory(), rank=1, world_size=2, rendezvous="file:///nowhere")
        assert dist.is_initialized(), "it is not ours to destroy"
    finally:
        dist.destroy_process_group()

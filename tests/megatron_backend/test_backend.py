"""A trainer that is closed leaves neither its model nor its process groups behind."""

import gc
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron_support import WEIGHTED, even_batch, make_backend, split, step_request
from torch.distributed.distributed_c10d import _world

from rlcore.spi import CloseRequest
from rlcore_megatron.modules.model import PolicyModel
from rlcore_torchkit.testing.models import make_model


def live_models() -> int:
    """Model chunks of this process that something refers to."""
    return sum(issubclass(type(each), PolicyModel) for each in gc.get_objects())


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_its_model_goes_with_it_though_steps_were_taken(architecture: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", architecture)
    gc.collect()  # what tests before have left
    groups_before, before = len(_world.pg_map), live_models()
    trainer = make_backend(tmp_path / "model", needs_reference=True)
    batch = even_batch(0)
    trainer.train_step(step_request(split(batch, [range(4), range(4, 8)]), batch.counts(), loss=WEIGHTED))
    assert live_models() == before + 2, "the policy and the reference"
    gc.disable()  # closing is to be enough
    try:
        trainer.close(CloseRequest())
        assert live_models() == before
    finally:
        gc.enable()
    assert len(_world.pg_map) == groups_before


def test_groups_go_though_the_default_one_is_somebody_elses(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make_backend(tmp_path / "model").close(CloseRequest())
        assert list(_world.pg_map) == [dist.group.WORLD]
    finally:
        dist.destroy_process_group()

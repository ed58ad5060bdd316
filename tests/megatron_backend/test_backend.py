"""A trainer that is closed leaves neither its model nor its process groups behind."""

import gc
import weakref
from pathlib import Path

import pytest
import torch.distributed as dist
from megatron_support import WEIGHTED, even_batch, make_backend, split, step_request
from torch.distributed.distributed_c10d import _world

from rlcore.spi import CloseRequest
from rlcore.testing.models import make_model


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe"])
def test_its_model_goes_with_it_though_steps_were_taken(architecture: str, tmp_path: Path) -> None:
    make_model(tmp_path / "model", architecture)
    groups_before = len(_world.pg_map)
    trainer = make_backend(tmp_path / "model", needs_reference=True)
    batch = even_batch(0)
    trainer.train_step(step_request(split(batch, [range(4), range(4, 8)]), batch.counts(), loss=WEIGHTED))
    models = [weakref.ref(model) for model in (*trainer._models, *trainer._reference)]
    assert all(model() is not None for model in models)
    gc.disable()  # closing is to be enough
    try:
        trainer.close(CloseRequest())
        assert [model() for model in models] == [None] * len(models)
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

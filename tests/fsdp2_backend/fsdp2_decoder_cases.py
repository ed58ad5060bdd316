"""What each of two ranks does in the tests of test_load_from_first."""

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_support import Reference, assert_stepped_alike, exported, make_backend, make_batch, split, step_request

from rlcore.spi import CloseRequest, LoadStateRequest, ModelError, SaveStateRequest

WORLD_SIZE = 2
SHARES = ([[0], [1, 2]], [[3, 4], [5]])
"""Microbatches of each rank."""


def train(rank: int, directory: Path, scratch: Path) -> None:
    """Two steps with a checkpoint and another trainer between them."""
    name = directory.name
    place: dict[str, Any] = {"rank": rank, "world_size": WORLD_SIZE, "local_rank": rank}
    place["rendezvous"] = f"file://{scratch / name}-rendezvous"
    trainer, reference, batch = make_backend(directory, **place), Reference(directory), make_batch()
    saved = scratch / f"{name}-saved"
    for version in range(2):
        result = trainer.train_step(step_request(split(batch, SHARES[rank]), batch.counts(), version))
        loss, norm = reference.step(batch)
        assert result.loss == pytest.approx(loss, abs=1e-4)
        assert result.grad_norm == pytest.approx(norm, rel=1e-3)
        if version == 0:
            saved.mkdir(exist_ok=True)
            trainer.save_state(SaveStateRequest(directory=saved, kind="resume"))
            torch.distributed.barrier()
            resumed = make_backend(directory, **place)
            trainer.close(CloseRequest())
            trainer = resumed
            assert trainer.load_state(LoadStateRequest(directory=saved)).weight_version == 1
    weights = exported(trainer, 2)
    if rank == 0:  # save_pretrained writes on no other
        assert_stepped_alike(weights, reference.saved(scratch / f"{name}-reference"))
    trainer.close(CloseRequest())


def refuse(rank: int, directory: Path, scratch: Path) -> None:
    """A failure of the rank that reads is one of all ranks."""
    place: dict[str, Any] = {"rank": rank, "world_size": WORLD_SIZE, "local_rank": rank}
    with pytest.raises(ModelError, match="lm_head|norm"):
        make_backend(directory, rendezvous=f"file://{scratch / 'refused'}", **place)


def run_all(rank: int, models: Path, broken: Path, scratch: Path) -> None:
    """Write what went wrong, or an empty string, by the model's name."""
    torch.set_num_threads(1)
    results = {}
    for directory in (*sorted(models.iterdir()), broken):
        try:
            (refuse if directory == broken else train)(rank, directory, scratch)
            results[directory.name] = ""
        except Exception:
            results[directory.name] = traceback.format_exc()
            break  # the ranks are out of step
    (scratch / f"results-{rank}.json").write_text(json.dumps(results))

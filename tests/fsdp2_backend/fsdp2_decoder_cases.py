"""What each of two ranks does in the tests of test_load_from_first."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp2_support import Reference, assert_stepped_alike, exported, make_backend, make_batch, split, step_request
from image_support import ImageReference, image_batch
from rank_launch import run_rows

from rlcore.spi import CloseRequest, LoadStateRequest, ModelError, SaveStateRequest
from rlcore_conformance.trainers.pieces import step_in_pieces
from rlcore_fsdp2.config import Fsdp2Config

WORLD_SIZE = 2
SHARES = ([[0], [1, 2]], [[3, 4], [5]])
"""Microbatches of each rank."""


def train(rank: int, directory: Path, scratch: Path, config: Fsdp2Config | None = None) -> None:
    """Two steps with a checkpoint and another trainer between them."""
    name = directory.name
    place: dict[str, Any] = {"rank": rank, "world_size": WORLD_SIZE, "local_rank": rank, "config": config}
    place["rendezvous"] = f"file://{scratch / name}-rendezvous"
    share = SHARES[rank] if config is None or config.tensor_parallel == 1 else [*SHARES[0], *SHARES[1]]
    reads_images = directory.name == "qwen3_vl"  # whose vision tower one microbatch of a rank does not ask
    reference = (ImageReference if reads_images else Reference)(directory)
    batch = image_batch(directory, 0) if reads_images else make_batch()
    trainer = make_backend(directory, **place)
    saved = scratch / f"{name}-saved"
    for version in range(2):
        request = step_request(split(batch, share), batch.counts(), version)
        result = step_in_pieces(trainer, request) if version == 1 else trainer.train_step(request)
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
    cases = {directory.name: partial(train, rank, directory, scratch) for directory in sorted(models.iterdir())}
    run_cases(rank, scratch, cases | {broken.name: partial(refuse, rank, broken, scratch)})


def run_cases(rank: int, scratch: Path, cases: Mapping[str, Callable[[], None]]) -> None:
    torch.set_num_threads(1)
    run_rows(cases, scratch / f"results-{rank}.json")

"""Checkpoints in Megatron's distributed format, which any layout can load: weights, optimizer and step counts.

`state/` is a checkpoint of megatron.core.dist_checkpointing (torch_dist). Under Megatron's name of a parameter it has the
float32 weights, under `optimizer.state.exp_avg.NAME` and `optimizer.state.exp_avg_sq.NAME` Adam's moments. `trainer.json` says
the rest.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, frozen
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlcore.spi import CheckpointError, RankInfo
from rlcore_megatron.checkpoints.checkpoint_check import check_shapes, read_metadata, require_seen
from rlcore_megatron.checkpoints.distributed_format import read, write
from rlcore_megatron.training import optimizer_state
from rlcore_megatron.training.optimizer_shards import Shard, parts_of, shards_of
from rlcore_megatron.training.optimizer_state import MASTER, MOMENTS
from rlcore_torchkit.distributed.agreement import first_rank, together
from rlcore_torchkit.huggingface.hf_directory import model_storage_errors

FORMAT = 1
INDEX, STATE = "trainer.json", "state"


@frozen(kw_only=True)
class Index:
    """The content of a checkpoint's trainer.json."""

    weight_version: int
    optimizer_steps: int
    world_size: int
    """Ranks that wrote it; for information."""
    format: int = FORMAT


def save(
    directory: Path, models: Sequence[Any], optimizer: MegatronOptimizer, weight_version: int, rank_info: RankInfo
) -> tuple[str, ...]:
    """Write this rank's files, together with all other ranks; returns their names. StorageError on every rank where the disk
    refuses a file of one."""
    shards = shards_of(models, optimizer)
    steps = optimizer_state.count_steps(optimizer)
    index = Index(weight_version=weight_version, optimizer_steps=steps, world_size=rank_info.world_size)
    mine = (INDEX,) if rank_info.rank == 0 else ()
    together(lambda: _write_index(directory, index, mine))
    files = write(directory / STATE, _tensors(_held(shards, steps)))
    return (*mine, *(f"{STATE}/{name}" for name in files))


def load(directory: Path, models: Sequence[Any], optimizer: MegatronOptimizer) -> int:
    """Fill weights and optimizer from the checkpoint of any layout, together with all other ranks; returns the weight version.

    What can be checked is checked before the first byte is copied, by rank 0, which alone reads what describes the checkpoint.
    CheckpointError on every rank.
    """
    shards = shards_of(models, optimizer)
    index, metadata = first_rank(lambda: (_read_index(directory), read_metadata(directory / STATE)))
    together(lambda: require_seen(directory / STATE))
    check_shapes(
        directory / STATE, metadata, _all_shapes(shards), [_prefix(moment) for moment in MOMENTS if index.optimizer_steps]
    )
    for model in models:
        model.start_param_sync(force_sync=True)  # waits for what is under way
    optimizer_state.make_state(optimizer, index.optimizer_steps)
    held = _held(shards, index.optimizer_steps)
    read(directory / STATE, _tensors(held), metadata)
    with torch.no_grad():
        for filled in held:
            optimizer_state.write(*filled)
    for part in parts_of(optimizer):
        part._copy_main_params_to_model_params()
    for model in models:
        model.start_param_sync(force_sync=True)
    return index.weight_version


def _write_index(directory: Path, index: Index, files: Sequence[str]) -> None:
    with model_storage_errors(directory):
        for name in files:
            (directory / name).write_text(json.dumps(asdict(index), indent=2) + "\n", encoding="utf-8")


def _read_index(directory: Path) -> Index:
    path = directory / INDEX
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise CheckpointError(f"{path}: found format {found['format']}; expected {FORMAT}")
        return Index(**found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error


def _held(shards: Sequence[Shard], num_steps: int) -> list[tuple[Shard, str, Tensor]]:
    """Return this rank's part of a checkpoint, in float32; without moments where no step was done."""
    names = (MASTER, *MOMENTS) if num_steps else (MASTER,)
    return [(shard, name, optimizer_state.read(shard, name)) for shard in shards for name in names]


def _tensors(held: Sequence[tuple[Shard, str, Tensor]]) -> list[ShardedTensor]:
    """Return views of the parts of one buffer."""
    return [view for shard, name, run in held for view in shard.divided("" if name == MASTER else _prefix(name), run)]


def _prefix(moment: str) -> str:
    return f"optimizer.state.{moment}."


def _all_shapes(shards: Sequence[Shard]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole model's tensors, by Megatron's names."""
    mine = {piece.name: piece.global_shape for shard in shards for piece in shard.pieces}
    everyone: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: shape for shapes in everyone for name, shape in shapes.items()}

"""Checkpoints in Megatron's distributed format, which any layout can load: weights, optimizer and step counts.

`state/` is a checkpoint of megatron.core.dist_checkpointing (torch_dist). Under Megatron's name of a parameter it has the
float32 weights, under `optimizer.state.exp_avg.NAME` and `optimizer.state.exp_avg_sq.NAME` Adam's moments, or what
`[optimizer]` keeps in their place, by the names of `shard_states`. `trainer.json` says the rest.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import asdict, evolve, field, frozen
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rlcore.spi import CheckpointError, RankInfo
from rlcore_megatron.checkpoints.checkpoint_check import check_kind, check_shapes, read_metadata, require_seen
from rlcore_megatron.checkpoints.distributed_format import read, write
from rlcore_megatron.training import optimizer_state
from rlcore_megatron.training.masters import MASTER
from rlcore_megatron.training.optimizer_shards import Shard, parts_of, shards_of
from rlcore_megatron.training.optimizer_state import names_of
from rlcore_megatron.training.shard_states import SCALES, ShardStates, StateKind
from rlcore_megatron.weights.adapters import rank_of
from rlcore_torchkit.distributed.agreement import first_rank, together
from rlcore_torchkit.huggingface.hf_directory import model_storage_errors

FORMAT = 1
INDEX, STATE = "trainer.json", "state"
STATE_PREFIX = "optimizer.state."
"""Beginning of the names of all tensors of the optimizer's state."""


@frozen(kw_only=True)
class Index:
    """The content of a checkpoint's trainer.json."""

    weight_version: int
    optimizer_steps: int
    world_size: int
    """Ranks that wrote it; for information."""
    optimizer: StateKind = field(factory=StateKind)
    lora_rank: int | None = None
    """The rank of adapters, of which more rows may be stored; None where it is that of their shapes."""
    format: int = FORMAT


def save(
    directory: Path, models: Sequence[Any], optimizer: MegatronOptimizer, weight_version: int, rank_info: RankInfo
) -> tuple[str, ...]:
    """Write this rank's files, together with all other ranks; returns their names. StorageError on every rank where the disk
    refuses a file of one."""
    shards = shards_of(models, optimizer)
    steps = optimizer_state.count_steps(optimizer)
    kind = _state_kind(optimizer)
    index = Index(
        weight_version=weight_version,
        optimizer_steps=steps,
        world_size=rank_info.world_size,
        optimizer=kind,
        lora_rank=rank_of(models),
    )
    mine = (INDEX,) if rank_info.rank == 0 else ()
    together(lambda: _write_index(directory, index, mine))
    files = write(directory / STATE, [*_tensors(_held(shards, steps)), *_scales(shards, steps, is_read=False)])
    return (*mine, *(f"{STATE}/{name}" for name in files))


def load(directory: Path, models: Sequence[Any], optimizer: MegatronOptimizer, *, with_state: bool = True) -> Index:
    """Fill weights and optimizer from the checkpoint of any layout, together with all other ranks; returns its description.

    Without `with_state` the optimizer begins anew. What can be checked is checked before the first byte is copied, by rank 0,
    which alone reads what describes the checkpoint.
    CheckpointError on every rank.
    """
    shards = shards_of(models, optimizer)
    index, metadata = first_rank(lambda: (_read_index(directory), read_metadata(directory / STATE)))
    together(lambda: require_seen(directory / STATE))
    if not with_state:
        index = evolve(index, optimizer_steps=0)
    kind = _state_kind(optimizer)
    if index.optimizer_steps:
        check_kind(directory / INDEX, index.optimizer, kind)
    check_shapes(directory / STATE, metadata, *_all_shapes(shards, index.optimizer_steps), STATE_PREFIX)
    for model in models:
        model.start_param_sync(force_sync=True)  # waits for what is under way
    optimizer_state.make_state(optimizer, index.optimizer_steps)
    held = _held(shards, index.optimizer_steps)
    read(directory / STATE, [*_tensors(held), *_scales(shards, index.optimizer_steps, is_read=True)], metadata)
    with torch.no_grad():
        for filled in held:
            optimizer_state.write(*filled)
    for part in parts_of(optimizer):
        part._copy_main_params_to_model_params()
    for model in models:
        model.start_param_sync(force_sync=True)
    return index


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
        kind = dict(found.pop("optimizer", {}))
        return Index(**found, optimizer=StateKind(**kind | {"outside_muon": tuple(kind.get("outside_muon", ()))}))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error


def _state_kind(optimizer: MegatronOptimizer) -> StateKind:
    """Return the kind of the whole model's state; called on every rank."""
    mine = [part.optimizer.kind for part in parts_of(optimizer) if isinstance(part.optimizer, ShardStates)]
    everyone: list[list[StateKind]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    kinds = [kind for of_rank in everyone for kind in of_rank]
    outside_muon = {name for kind in kinds for name in kind.outside_muon}
    return evolve(kinds[0], outside_muon=tuple(sorted(outside_muon))) if kinds else StateKind()


def _held(shards: Sequence[Shard], num_steps: int) -> list[tuple[Shard, str, Tensor]]:
    """Return this rank's part of a checkpoint but for scales, in float32 or as codes; without state where no step was done."""
    return [
        (shard, name, optimizer_state.read(shard, name))
        for shard in shards
        for name in (MASTER, *(names_of(shard) if num_steps else ()))
    ]


def _scales(shards: Sequence[Shard], num_steps: int, *, is_read: bool) -> list[ShardedTensor]:
    """Return views of the scales of moments in 8 bits."""
    return [
        tensor
        for shard in (shards if num_steps else ())
        for name in SCALES
        if name in shard.state
        for tensor in shard.divided_scales(_prefix(name), shard.state[name], is_read=is_read)
    ]


def _tensors(held: Sequence[tuple[Shard, str, Tensor]]) -> list[ShardedTensor]:
    """Return views of the parts of one buffer."""
    return [view for shard, name, run in held for view in shard.divided("" if name == MASTER else _prefix(name), run)]


def _prefix(name: str) -> str:
    return f"{STATE_PREFIX}{name}."


def _all_shapes(shards: Sequence[Shard], num_steps: int) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Return the shapes of the whole model's tensors, by Megatron's names, and of the optimizer's state of them."""
    mine = {piece.name: piece.global_shape for shard in shards for piece in shard.pieces}
    state = {
        f"{_prefix(name)}{piece.name}": piece.global_shape
        for shard in (shards if num_steps else ())
        for name in names_of(shard)
        for piece in shard.pieces
    }
    everyone: list[tuple[dict[str, tuple[int, ...]], ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, state))
    weights, states = ({name: shape for found in each for name, shape in found.items()} for each in zip(*everyone, strict=True))
    return weights, states

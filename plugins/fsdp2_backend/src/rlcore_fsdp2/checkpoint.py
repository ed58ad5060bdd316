"""Sharded checkpoints that any layout can load: each rank writes its parts and where they lie in the whole.

Rank r writes `trainer-rrrrr.safetensors` with the tensors `parameter/NAME` and those of the optimizer's state, such as
`exp_avg/NAME`, and `trainer-rrrrr.json` with each name's global shape and the part's offset and shape; of scales, which have
shapes of their own, by `exp_avg_scale/NAME`. Of a part that several ranks hold the first
writes it, and the others write an empty one. Frozen parameters are not in it: with adapters, these alone are.

In loading, rank 0 alone reads what describes the checkpoint. A rank opens the files that hold something of its parts, and of a
part that several ranks hold the first reads it and sends it to the others.

torch.distributed.checkpoint would do the same, but its index is a pickle, and reading a pickle runs what it says.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import add
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlcore.spi import CheckpointError, RankInfo, ShardSlice
from rlcore_fsdp2.adapters import trained
from rlcore_fsdp2.optimizer import SCALE, STEP, Optimizer
from rlcore_fsdp2.sharding import held_part, is_first_copy, local, send_copies, written_part
from rlcore_torchkit.distributed.agreement import first_rank, together
from rlcore_torchkit.huggingface.hf_directory import model_storage_errors
from rlcore_torchkit.trainer.trainer_hooks import check_same_shapes

FORMAT = 1
Tensors: TypeAlias = Mapping[str, Tensor]


def save(
    directory: Path,
    rank_info: RankInfo,
    model: nn.Module,
    optimizer: Optimizer,
    weight_version: int,
    lora_rank: int | None = None,
) -> tuple[str, ...]:
    """Write this rank's files; returns their names. `lora_rank` is that of the adapters, of which more rows may be stored.
    Raises StorageError where the disk refuses them."""
    parameters = trained(model)
    keyed = _keyed(parameters, optimizer)
    tensors = {key: _written(tensor) for key, tensor in keyed.items()}
    index = {
        "format": FORMAT,
        "world_size": rank_info.world_size,
        "weight_version": weight_version,
        "lora_rank": lora_rank,
        "parts": {name: _entry(name, parameter) for name, parameter in parameters.items()},
        "scales": {key: _entry(key, tensor) for key, tensor in keyed.items() if _is_scale(key)},
        "optimizer_steps": {name: _step(optimizer, parameter) for name, parameter in parameters.items()},
    }
    stem = f"trainer-{rank_info.rank:05d}"
    with model_storage_errors(directory):
        save_file(tensors, directory / f"{stem}.safetensors")
        (directory / f"{stem}.json").write_text(json.dumps(index))
    return f"{stem}.safetensors", f"{stem}.json"


def _entry(name: str, parameter: Tensor) -> dict[str, tuple[int, ...]]:
    part = written_part(name, parameter)
    return {"global_shape": tuple(parameter.shape), "offset": part.start, "shape": part.shape}


def _written(tensor: Tensor) -> Tensor:
    part = local(tensor).detach()
    return part.contiguous() if is_first_copy(tensor) else part.new_empty((0,) * tensor.ndim)


@frozen(kw_only=True)
class _Stored:
    """The content of a checkpoint's files."""

    weight_version: int
    lora_rank: int | None
    """The rank of adapters; None where it is that of their shapes."""
    steps: Mapping[str, int]
    """The optimizer's count for each parameter."""
    blocks: Mapping[str, Mapping[str, ShardSlice]]
    """The block that each file has of a parameter or scale: by the parameter's name or the scale's key, then by the file."""

    def blocks_of(self, key: str) -> Mapping[str, ShardSlice]:
        """Return the blocks of a key of the files."""
        return self.blocks[key if _is_scale(key) else key.split("/", 1)[1]]


def _is_scale(key: str) -> bool:
    return key.split("/", 1)[0].endswith(SCALE)


def load(directory: Path, model: nn.Module, optimizer: Optimizer) -> tuple[int, int | None]:
    """Fill `model` and `optimizer` from the files of any layout, together with all other ranks; returns the weight version, and
    the rank of adapters, None where it is that of their shapes.

    Everything is checked before the first byte is copied. Raises CheckpointError on every rank.
    """
    parameters = trained(model)
    kinds = {name: optimizer.kinds(parameter) for name, parameter in parameters.items()}
    stored = first_rank(lambda: _checked(directory, parameters, kinds))
    needed = {stem for name, parameter in parameters.items() for stem in _sources(parameter, stored.blocks[name])}
    with ExitStack() as stack:
        files = together(lambda: _opened(directory, sorted(needed), stack))
        _prepare_optimizer(optimizer, parameters, stored.steps)
        keyed = _keyed(parameters, optimizer)
        together(lambda: _fill_all(directory, keyed, files, stored))
    send_copies(keyed.values())
    return stored.weight_version, stored.lora_rank


def _checked(directory: Path, parameters: Tensors, kinds: Mapping[str, Sequence[str]]) -> _Stored:
    """`_read_stored`; CheckpointError too where an index is of another form than `save` writes."""
    try:
        return _read_stored(directory, parameters, kinds)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{directory}: an index is damaged ({type(error).__name__}: {error}); resume from another checkpoint"
        ) from error


def _read_stored(directory: Path, parameters: Tensors, kinds: Mapping[str, Sequence[str]]) -> _Stored:
    """Read what is stored, where all of it is there and fits the model."""
    indices = _read_indices(directory)
    _check_same_model(directory, parameters, indices)
    any_index = next(iter(indices.values()))
    blocks: dict[str, dict[str, ShardSlice]] = {name: {} for name in parameters}
    with ExitStack() as stack:
        files = _opened(directory, list(indices), stack)
        _check_complete(directory, files, indices, any_index["optimizer_steps"], kinds)
    for stem, index in indices.items():
        for name, part in (index["parts"] | index["scales"]).items():
            block = ShardSlice(name, tuple(part["offset"]), tuple(map(add, part["offset"], part["shape"])))
            blocks.setdefault(name, {}).update({stem: block} if block.size else {})
    rank = any_index.get("lora_rank")
    return _Stored(
        weight_version=int(any_index["weight_version"]),
        lora_rank=None if rank is None else int(rank),
        steps=any_index["optimizer_steps"],
        blocks=blocks,
    )


def _sources(tensor: Tensor, blocks: Mapping[str, ShardSlice]) -> dict[str, tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Return the slices of a tensor that this rank reads, by the file's stem: into its part and into the file's block. Nothing
    where another rank sends it."""
    if not is_first_copy(tensor):
        return {}
    mine = held_part("", tensor)
    common = {stem: mine.common(block) for stem, block in blocks.items()}
    return {stem: (part.within(mine), part.within(blocks[stem])) for stem, part in common.items() if part.size}


def _keyed(parameters: Tensors, optimizer: Optimizer) -> dict[str, Tensor]:
    """All tensors of the state by their key in the files."""
    keyed = {f"parameter/{name}": parameter for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        keyed |= {f"{kind}/{name}": tensor for kind, tensor in state.items() if kind != STEP}
    return keyed


def _step(optimizer: Optimizer, parameter: Tensor) -> int:
    state = optimizer.state.get(parameter, {})
    return int(state[STEP]) if STEP in state else 0


def _prepare_optimizer(optimizer: Optimizer, parameters: Tensors, steps: Mapping[str, int]) -> None:
    """Give the optimizer state of the right shape, with the saved step counts; none where no step was done."""
    for name, parameter in parameters.items():
        if steps[name] == 0:
            optimizer.state.pop(parameter, None)
            continue
        optimizer.begin(parameter, steps[name])


def _read_indices(directory: Path) -> dict[str, dict[str, Any]]:
    """The index of every writer by its file's stem."""
    paths = sorted(directory.glob("trainer-*.json"))
    try:
        indices = {path.stem: json.loads(path.read_text()) for path in paths}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{directory}: an index cannot be read ({error}); resume from another checkpoint") from error
    expected = next((index["world_size"] for index in indices.values()), 1)
    if len(paths) != expected:
        raise CheckpointError(
            f"{directory}: found {len(paths)} trainer-*.json; expected {expected!r}. Resume from another checkpoint"
        )
    formats = {index["format"] for index in indices.values()}
    versions = {index["weight_version"] for index in indices.values()}
    if formats != {FORMAT} or len(versions) != 1:
        found = f"formats {sorted(formats)} and weight versions {sorted(versions)}"
        raise CheckpointError(f"{directory}: found {found}; expected format {FORMAT} and one version")
    return indices


def _check_same_model(directory: Path, parameters: Tensors, indices: Mapping[str, Mapping[str, Any]]) -> None:
    ours = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    for index in indices.values():
        check_same_shapes(directory, {name: tuple(part["global_shape"]) for name, part in index["parts"].items()}, ours)


def _opened(directory: Path, stems: Sequence[str], stack: ExitStack) -> dict[str, Any]:
    """The files of these stems, which stay open as long as the stack."""
    with _reading(directory):
        return {stem: stack.enter_context(safe_open(directory / f"{stem}.safetensors", "pt")) for stem in stems}


@contextmanager
def _reading(directory: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: a tensor file cannot be read ({error}); resume from another checkpoint") from error


def _check_complete(
    directory: Path,
    files: Mapping[str, Any],
    indices: Mapping[str, Any],
    steps: Mapping[str, int],
    kinds: Mapping[str, Sequence[str]],
) -> None:
    """Every key that the index promises is in the files with the promised shape, and the state is of the same optimizer."""
    for stem, file in files.items():
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        index = indices[stem]
        promised = {f"parameter/{name}": part["shape"] for name, part in index["parts"].items()} | {
            f"{kind}/{name}": (index["scales"].get(f"{kind}/{name}") or part)["shape"]
            for name, part in index["parts"].items()
            for kind in (kinds[name] if steps[name] else ())
        }
        for key in sorted(promised.keys() | found.keys(), reverse=True):  # parameters first: their shapes name the cause
            if found.get(key) != (tuple(promised[key]) if key in promised else None):
                raise CheckpointError(
                    f"{directory / stem}.safetensors: found {found.get(key, 'nothing')} for {key}; "
                    f"expected {promised.get(key, 'no such tensor')}. Resume from another checkpoint, or with the [optimizer] "
                    "of the run that saved it"
                )


@torch.no_grad()
def _fill_all(directory: Path, keyed: Tensors, files: Mapping[str, Any], stored: _Stored) -> None:
    """Copy this rank's parts of all tensors from the files that hold something of them."""
    for key, tensor in keyed.items():
        target = local(tensor)
        for stem, (into, source) in _sources(tensor, stored.blocks_of(key)).items():
            with _reading(directory):
                target[into].copy_(files[stem].get_slice(key)[source])

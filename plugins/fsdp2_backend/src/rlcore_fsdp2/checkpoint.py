"""Sharded checkpoints that any layout can load: each rank writes its parts and where they lie in the whole.

Rank r writes `trainer-rrrrr.safetensors` with the tensors `parameter/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME`, and
`trainer-rrrrr.json` with each name's global shape and the part's offset and shape. Of a part that several ranks hold the first
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
from rlcore_fsdp2.sharding import held_part, is_first_copy, local, send_copies, written_part
from rlcore_torchkit.distributed.agreement import first_rank, together
from rlcore_torchkit.huggingface.hf_directory import model_storage_errors
from rlcore_torchkit.trainer.trainer_hooks import check_same_shapes

FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")
Tensors: TypeAlias = Mapping[str, Tensor]


def save(
    directory: Path, rank_info: RankInfo, model: nn.Module, optimizer: torch.optim.Optimizer, weight_version: int
) -> tuple[str, ...]:
    """Write this rank's files; returns their names. Raises StorageError where the disk refuses them."""
    parameters = trained(model)
    tensors = {key: _written(tensor) for key, tensor in _keyed(parameters, optimizer).items()}
    index = {
        "format": FORMAT,
        "world_size": rank_info.world_size,
        "weight_version": weight_version,
        "parts": {name: _entry(name, parameter) for name, parameter in parameters.items()},
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
    steps: Mapping[str, int]
    """The optimizer's count for each parameter."""
    blocks: Mapping[str, Mapping[str, ShardSlice]]
    """By parameter, and by the stem of each file that has something of it: which block."""


def load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill `model` and `optimizer` from the files of any layout, together with all other ranks; returns the weight version.

    Everything is checked before the first byte is copied. Raises CheckpointError on every rank.
    """
    parameters = trained(model)
    stored = first_rank(lambda: _checked(directory, parameters))
    needed = {stem for name, parameter in parameters.items() for stem in _sources(parameter, stored.blocks[name])}
    with ExitStack() as stack:
        files = together(lambda: _opened(directory, sorted(needed), stack))
        _prepare_optimizer(optimizer, parameters, stored.steps)
        keyed = _keyed(parameters, optimizer)
        together(lambda: _fill_all(directory, keyed, files, stored))
    send_copies(keyed.values())
    return stored.weight_version


def _checked(directory: Path, parameters: Tensors) -> _Stored:
    """`_read_stored`; CheckpointError too where an index is of another form than `save` writes."""
    try:
        return _read_stored(directory, parameters)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{directory}: an index is damaged ({type(error).__name__}: {error}); resume from another checkpoint"
        ) from error


def _read_stored(directory: Path, parameters: Tensors) -> _Stored:
    """Read what is stored, where all of it is there and fits the model."""
    indices = _read_indices(directory)
    _check_same_model(directory, parameters, indices)
    any_index = next(iter(indices.values()))
    blocks: dict[str, dict[str, ShardSlice]] = {name: {} for name in parameters}
    with ExitStack() as stack:
        files = _opened(directory, list(indices), stack)
        _check_complete(directory, files, indices, any_index["optimizer_steps"])
    for stem, index in indices.items():
        for name, part in index["parts"].items():
            block = ShardSlice(name, tuple(part["offset"]), tuple(map(add, part["offset"], part["shape"])))
            blocks[name] |= {stem: block} if block.size else {}
    return _Stored(weight_version=int(any_index["weight_version"]), steps=any_index["optimizer_steps"], blocks=blocks)


def _sources(tensor: Tensor, blocks: Mapping[str, ShardSlice]) -> dict[str, tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Return the slices of a tensor that this rank reads, by the file's stem: into its part and into the file's block. Nothing
    where another rank sends it."""
    if not is_first_copy(tensor):
        return {}
    mine = held_part("", tensor)
    common = {stem: mine.common(block) for stem, block in blocks.items()}
    return {stem: (part.within(mine), part.within(blocks[stem])) for stem, part in common.items() if part.size}


def _keyed(parameters: Tensors, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of the state by their key in the files."""
    keyed = {f"parameter/{name}": parameter for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        keyed |= {f"{moment}/{name}": state[moment] for moment in MOMENTS if moment in state}
    return keyed


def _step(optimizer: torch.optim.Optimizer, parameter: Tensor) -> int:
    state = optimizer.state.get(parameter, {})
    return int(state["step"]) if "step" in state else 0


def _prepare_optimizer(optimizer: torch.optim.Optimizer, parameters: Tensors, steps: Mapping[str, int]) -> None:
    """Give the optimizer state of the right shape, with the saved step counts; none where no step was done."""
    for name, parameter in parameters.items():
        if steps[name] == 0:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state[parameter]
        for moment in MOMENTS:
            if moment not in state:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
        state["step"] = torch.tensor(float(steps[name]), dtype=torch.float32, device=local(parameter).device)


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


def _check_complete(directory: Path, files: Mapping[str, Any], indices: Mapping[str, Any], steps: Mapping[str, int]) -> None:
    """Every key that the index promises is in the files with the promised shape."""
    for stem, file in files.items():
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        for name, part in indices[stem]["parts"].items():
            for kind in ("parameter", *(MOMENTS if steps[name] else ())):
                if found.get(f"{kind}/{name}") != tuple(part["shape"]):
                    raise CheckpointError(
                        f"{directory / stem}.safetensors: found {found.get(f'{kind}/{name}', 'nothing')} for {kind}/{name}; "
                        f"expected {part['shape']}. Resume from another checkpoint"
                    )


@torch.no_grad()
def _fill_all(directory: Path, keyed: Tensors, files: Mapping[str, Any], stored: _Stored) -> None:
    """Copy this rank's parts of all tensors from the files that hold something of them."""
    for key, tensor in keyed.items():
        target = local(tensor)
        for stem, (into, source) in _sources(tensor, stored.blocks[key.split("/", 1)[1]]).items():
            with _reading(directory):
                target[into].copy_(files[stem].get_slice(key)[source])

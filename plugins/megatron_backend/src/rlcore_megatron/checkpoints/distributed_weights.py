"""The weights of a model's chunks as a checkpoint of Megatron's distributed format (torch_dist), which any layout can read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rlcore.spi import Problem
from rlcore_megatron.checkpoints import distributed_format
from rlcore_megatron.checkpoints.checkpoint_check import read_metadata, require_seen
from rlcore_megatron.families.weight_mapping import FUSED_NORMS
from rlcore_megatron.families.weight_source import EMBEDDING
from rlcore_megatron.layouts.parallel import holders_of, share
from rlcore_megatron.training.optimizer_shards import CONTENT
from rlcore_torchkit.distributed.agreement import first_rank, together
from rlcore_torchkit.huggingface.safetensors_files import raise_model_problems

MAX_NAMED = 5
_NUMBERED = re.compile(r"(^|\.)decoder\.layers\.\d+\.")


def write(directory: Path, model_chunks: Sequence[Any]) -> None:
    """Together with all other ranks, into an empty directory. StorageError on every rank where that fails on one."""
    distributed_format.write(directory, [tensor for _, tensor in _tensors(model_chunks, "", CONTENT)])


def read(directory: Path, model_chunks: Sequence[Any]) -> None:
    """Fill every parameter, together with all other ranks, from what any layout wrote: our own or Megatron-LM. Of the ranks
    that hold the same of a parameter one reads it.

    What else the checkpoint holds (an optimizer, arguments) is not looked at. ModelError on every rank where it lacks
    something; CheckpointError where its files are incomplete or damaged.
    """
    metadata = first_rank(lambda: read_metadata(directory))
    together(lambda: require_seen(directory))
    stored = stored_shapes(metadata)
    names = sorted((name for name in stored if name.endswith(EMBEDDING)), key=len)
    prefix = names[0].removesuffix(EMBEDDING) if names else ""
    content = {
        "singleton_local_shards": any(name.endswith(".linear_fc1.weight_w") for name in stored),
        "non_homogeneous_layers": any(_NUMBERED.search(name) for name in stored),
    }
    held = [(parameter, _renamed(tensor, stored)) for parameter, tensor in _tensors(model_chunks, prefix, content)]
    together(lambda: _check(str(directory), [tensor for _, tensor in held], stored))
    mine = [tensor for parameter, tensor in held if dist.get_rank(holders_of(parameter)) == 0]
    distributed_format.read(directory, mine, metadata)
    share({id(parameter): parameter for parameter, _ in held}.values())


def stored_shapes(metadata: Metadata) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a checkpoint, by name."""
    entries = metadata.state_dict_metadata
    return {name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}


def _tensors(model_chunks: Sequence[Any], prefix: str, content: Mapping[str, bool]) -> Iterator[tuple[Tensor, ShardedTensor]]:
    """Return each parameter of the model chunks with views of it, one after another."""
    for model_chunk in model_chunks:
        state, _ = extract_sharded_tensors_and_factories(model_chunk.sharded_state_dict(prefix=prefix, metadata=dict(content)))
        for entry in nested_values(state):
            parameter = entry.data
            built = nested_values({"": entry.build()}) if isinstance(entry, ShardedTensorFactory) else [entry]
            for tensor in built:
                tensor.data = tensor.data.detach()
                yield parameter, tensor


def _renamed(tensor: ShardedTensor, stored: Mapping[str, tuple[int, ...]]) -> ShardedTensor:
    """The tensor under the name that the checkpoint has it by."""
    for names in FUSED_NORMS.items():  # TransformerEngine's layers or Megatron's own wrote it
        for name, other in (names, names[::-1]):
            if tensor.key not in stored and tensor.key.endswith(name):
                found = tensor.key.removesuffix(name) + other
                tensor.key = found if found in stored else tensor.key
    return tensor


def _problems(path: str, tensor: ShardedTensor, stored: Mapping[str, tuple[int, ...]]) -> Iterator[Problem]:
    found, expected = stored.get(tensor.key), tuple(tensor.global_shape)
    if found is None:
        yield Problem(path=path, found=f"no {tensor.key}", expected=f"a tensor of shape {list(expected)}")
        return
    # Megatron-LM lengthens the vocabulary until it can be divided.
    is_padded = tensor.allow_shape_mismatch and found[0] > expected[0] and found[1:] == expected[1:]
    if found != expected and not is_padded:
        yield Problem(
            path=path, found=f"{tensor.key} of shape {list(found)}", expected=f"{list(expected)}, as config.json says"
        )


def _check(path: str, tensors: Sequence[ShardedTensor], stored: Mapping[str, tuple[int, ...]]) -> None:
    raise_model_problems(path, [problem for tensor in tensors for problem in _problems(path, tensor, stored)], MAX_NAMED)

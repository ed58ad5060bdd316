"""This rank's part of the weights, read from a Hugging Face model's files and nothing else of them."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.spi import Head, ModelError, ModelSpec, Problem
from rlcore.spi.weights import VALUE_HEAD_WEIGHT
from rlcore_megatron.families.models import architecture_of, may_lack_value_head
from rlcore_megatron.families.weight_mapping import SHARED, Names
from rlcore_megatron.families.weight_source import Blocks, HfTensor, Source, Stack
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.layouts.parallel import holders_of, share
from rlcore_megatron.weights.parameter_rows import row_ranges, rows_of, source_shape, tensor_rank_and_size
from rlcore_torchkit.distributed.agreement import together
from rlcore_torchkit.huggingface.safetensors_files import TensorFiles, open_tensors

OUTPUT_WEIGHT = "lm_head.weight"
"""The output layer, which files may hold in any case: as a copy of a tied embedding, or where a head of values replaces it."""


@torch.no_grad()
def load_hf(model_chunks: Sequence[Any], hf: Any, spec: ModelSpec, layout: ParallelLayout, head: Head = "tokens") -> None:
    """Fill every parameter of `model_chunks`, in its own dtype, with its rank's share of the tensors at `spec`, together with
    all other ranks: of those that hold the same share one reads it. A head of values that a language model's files do not hold
    is zero.

    ModelError, the same on every rank, where one cannot read a file, and where tensors of the architecture are missing or have
    another shape.
    """
    names = Names.of(hf, head)
    held = _held(model_chunks, names, layout)
    with ExitStack() as stack:
        files = together(lambda: stack.enter_context(open_tensors(spec)))
        absent = {VALUE_HEAD_WEIGHT} if VALUE_HEAD_WEIGHT not in files and may_lack_value_head(hf) else set[str]()
        expected = [tensor for tensor in names.order if tensor.name not in absent]
        known = {*_file_names(expected), *absent, OUTPUT_WEIGHT}
        files = files.renamed(architecture_of(hf).other_names, known)
        together(lambda: files.raise_unknown(known, hf.to_dict()))
        together(lambda: _fill_all(held, expected, absent, files, layout))
    share(parameter for parameter, _ in held)


@torch.no_grad()
def load_multi_token_head(model_chunks: Sequence[Any], hf: Any, spec: ModelSpec, layout: ParallelLayout) -> None:
    """Fill the head that predicts the token after the next, as `load_hf` does the trunk, which has its weights already.

    ModelError too, the same on every rank, where the files have an embedding or an output layer for the head that is not the
    trunk's.
    """
    names = Names.of_multi_token_head(hf)
    copies = {tensor.name for name in SHARED for tensor in names.sources[name].tensors}
    held = _held(model_chunks, names, layout)
    own = [(parameter, source) for parameter, source in held if source.parameter not in SHARED]
    with ExitStack() as stack:
        files = together(lambda: stack.enter_context(open_tensors(spec)))
        expected = [tensor for tensor in names.order if tensor.name not in copies or tensor.name in files]
        together(lambda: _fill_all(own, expected, (), files, layout))
        shared = [each for each in held if each[1].parameter in SHARED and each[1].tensors[0].name in files]
        together(lambda: files.raise_problems([problem for each in shared for problem in _copy_problems(*each, files, layout)]))
    share(parameter for parameter, _ in own)


def _file_names(expected: Sequence[HfTensor]) -> Iterator[str]:
    """Yield the names of these tensors in files: their own, or those of tensors that hold all experts of a layer."""
    for tensor in expected:
        yield tensor.name
        if tensor.place is not None:
            yield tensor.place.name
        if tensor.fused is not None:
            yield tensor.fused[0]


def _held(model_chunks: Sequence[Any], names: Names, layout: ParallelLayout) -> list[tuple[Tensor, Source]]:
    """This rank's parameters of these names."""
    return [
        (model_chunk.get_parameter(name), source)
        for model_chunk in model_chunks
        for name, source in names.of_model_chunk(model_chunk, layout.expert_rank, layout.expert).items()
    ]


def _fill_all(
    held: Sequence[tuple[Tensor, Source]],
    expected: Sequence[HfTensor],
    absent: Collection[str],
    files: TensorFiles,
    layout: ParallelLayout,
) -> None:
    """Copy what this rank reads of these parameters, once all tensors that are expected are known to be there."""
    files.raise_problems(list(_problems(expected, files)))
    for parameter, source in held:
        if source.tensors[0].name in absent:
            parameter.zero_()
        elif dist.get_rank(holders_of(parameter)) == 0:
            _fill(parameter, source, files, layout)


def _copy_problems(parameter: Tensor, source: Source, files: TensorFiles, layout: ParallelLayout) -> Iterator[Problem]:
    (tensor,), (rank, size) = source.tensors, tensor_rank_and_size(source, layout)
    (rows,) = row_ranges(source, rank, size)
    if dist.get_rank(holders_of(parameter)) != 0:
        return
    if not _part(files, tensor, rows, rank, size, parameter.dtype).to(parameter).equal(parameter):
        yield files.problem(
            f"a {tensor.name} that is not the trunk's", "the same: the multi-token head shares embedding and output layer"
        )


def _fill(parameter: Tensor, source: Source, files: TensorFiles, layout: ParallelLayout) -> None:
    rank, size = tensor_rank_and_size(source, layout)
    shape = source_shape(source, size)
    if tuple(parameter.shape) != shape:
        problem = Problem(
            path=source.parameter, found=f"a parameter of shape {list(parameter.shape)}", expected=str(list(shape))
        )
        raise ModelError([problem])
    views, ranges = rows_of(parameter.data, source, rank, size), row_ranges(source, rank, size)
    for view, tensor, rows in zip(views, source.tensors, ranges, strict=True):
        if view.numel():
            view.copy_(_part(files, tensor, rows, rank, size, view.dtype).reshape(view.shape))


def _problems(expected: Sequence[HfTensor], files: TensorFiles) -> Iterator[Problem]:
    for tensor in expected:
        if tensor.place is not None:
            yield from _place_problems(tensor.place, files)
        elif tensor.name in files:
            found = files.shape(tensor.name)
            if found != tensor.shape:
                yield files.problem(f"{tensor.name} of shape {list(found)}", f"{list(tensor.shape)}, as config.json says")
        elif tensor.fused is None or tensor.fused[0] not in files:
            yield files.problem(f"no {tensor.name} in the weights", f"a tensor of shape {list(tensor.shape)}")
        else:
            name, expert, first = tensor.fused
            found, (rows, columns) = files.shape(name), tensor.shape
            if len(found) != 3 or found[0] <= expert or found[1] < first + rows or found[2] != columns:
                yield files.problem(
                    f"{name} of shape {list(found)}", f"expert {expert} in it with rows up to {first + rows} of {columns}"
                )


def _place_problems(place: Stack | Blocks, files: TensorFiles) -> Iterator[Problem]:
    """Once for all tensors in the file's."""
    if place.is_first and place.name not in files:
        yield files.problem(f"no {place.name} in the weights", f"a tensor of shape {list(place.shape)}")
    elif place.is_first and files.shape(place.name) != place.shape:
        found = f"{place.name} of shape {list(files.shape(place.name))}"
        yield files.problem(found, f"{list(place.shape)}, as config.json says")


def _part(files: TensorFiles, tensor: HfTensor, rows: slice, rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """These rows of the tensor, and of their columns what rank `rank` of `size` has; only that is read."""
    columns = [
        slice(rank * (length // size), (rank + 1) * (length // size)) if tensor.tp_dim == 1 else slice(0, length)
        for length in tensor.shape[1:]
    ]
    if tensor.place is not None:
        return tensor.place.taken(files.read(tensor.place.name, tensor.place.bounds(rows, columns), dtype))
    bounds = [rows, *columns]
    if tensor.name in files:
        return files.read(tensor.name, bounds, dtype)
    assert tensor.fused is not None
    name, expert, first = tensor.fused
    found = [slice(expert, expert + 1), slice(first + rows.start, first + rows.stop), *columns]
    return files.read(name, found, dtype)[0]

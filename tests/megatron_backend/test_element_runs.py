"""Runs of a parameter's elements: whatever part of it a rank holds, its blocks are the elements of the files' matrices."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore_megatron.families.weight_source import Blocks, HfTensor, Source, Stack
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.weights.element_runs import element_runs
from rlcore_megatron.weights.parameter_rows import row_ranges, rows_of, source_shape

WIDTH = 4


def _named(name: str, rows: int, **options: Any) -> HfTensor:
    return HfTensor(name=name, shape=(rows, WIDTH), **options)


def _expert_part(name: str, part: int, num_parts: int, rows: int) -> HfTensor:
    place = Stack(name="stack", shape=(3, WIDTH, rows * num_parts), expert=1, part=part, num_parts=num_parts)
    return _named(name, rows, tp_dim=0, place=place)


def _in_turn(name: str, first: int, size: int, period: int) -> HfTensor:
    return _named(
        name, 4 * size, tp_dim=0, place=Blocks(name="blocks", shape=(4 * period, WIDTH), first=first, size=size, period=period)
    )


SOURCES = {
    "queries, keys and values": Source(
        parameter="qkv", tensors=tuple(_named(name, rows, tp_dim=0) for name, rows in (("q", 16), ("k", 8), ("v", 8))), groups=2
    ),
    "gate and up": Source(parameter="fc1", tensors=tuple(_named(name, 8, tp_dim=0) for name in ("gate", "up"))),
    "columns": Source(parameter="fc2", tensors=(_named("down", 6, tp_dim=1),)),
    "not divided": Source(parameter="router", tensors=(_named("gate", 6),)),
    "interleaved in a stack": Source(
        parameter="fc1", tensors=tuple(_expert_part(f"part{part}", part, 2, 8) for part in (0, 1))
    ),
    "alone in a stack": Source(parameter="fc2", tensors=(_expert_part("down", 0, 1, 8),)),
    "in turn": Source(parameter="in_proj", tensors=(_in_turn("q", 0, 2, 6), _in_turn("v", 2, 4, 6))),
}


def parameters(source: Source, size: int) -> Iterator[tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
    """Each tensor rank's parameter, filled as the loader fills it, and the matrices of the files."""
    matrices: dict[str, torch.Tensor] = {}
    for tensor in source.tensors:
        if tensor.file_name not in matrices:
            matrices[tensor.file_name] = torch.randn(tensor.file_shape)
    for rank in range(size):
        parameter = torch.empty(source_shape(source, size))
        views, ranges = rows_of(parameter, source, rank, size), row_ranges(source, rank, size)
        for view, tensor, rows in zip(views, source.tensors, ranges, strict=True):
            width = tensor.shard_shape(size)[1]
            columns = [slice(rank * width, (rank + 1) * width) if tensor.tp_dim == 1 else slice(0, width)]
            matrix = matrices[tensor.file_name]
            if tensor.place is None:
                part = matrix[rows, columns[0]]
            else:
                part = tensor.place.taken(matrix[tuple(tensor.place.bounds(rows, columns))])
            view.copy_(part.reshape(view.shape))
        yield rank, parameter, matrices


@pytest.mark.parametrize("name", SOURCES)
@given(size=st.sampled_from([1, 2, 4]), cuts=st.lists(st.integers(0, 160), max_size=3))
def test_blocks_hold_what_the_loader_put_there(name: str, size: int, cuts: list[int]) -> None:
    source = SOURCES[name]
    for rank, parameter, matrices in parameters(source, size):
        flat = parameter.flatten()
        bounds = sorted({0, len(flat), *(cut for cut in cuts if cut < len(flat))})
        for first, beyond in itertools.pairwise(bounds):
            runs = element_runs(source, ParallelLayout(rank=rank, tensor=size, expert_tensor=size), first, beyond)
            assert [run.first for run in runs] == [first, *(run.beyond for run in runs[:-1])]
            assert runs[-1].beyond == beyond
            for run in runs:
                assert run.block is not None
                matrix = matrices[run.tensor.file_name]
                matrix = matrix[1] if run.block.name.endswith("[1]") else matrix
                assert tuple(matrix.shape) == run.block.shape
                assert run.block.size == run.beyond - run.first
                assert torch.equal(run.block.taken(matrix).flatten(), flat[run.first : run.beyond])


def test_vectors_and_kernels_of_convolutions_have_no_block() -> None:
    norm = Source(parameter="norm", tensors=(HfTensor(name="norm", shape=(6,)),))
    kernel = Source(parameter="conv1d", tensors=(HfTensor(name="conv1d", shape=(6, 1, 4), tp_dim=0),))
    for source, beyond in ((norm, 6), (kernel, 24)):
        (run,) = element_runs(source, ParallelLayout(), 0, beyond)
        assert (run.first, run.beyond, run.block) == (0, beyond, None)

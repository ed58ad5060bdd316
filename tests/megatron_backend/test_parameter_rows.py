"""The rows of a rank's parameter that belong to each tensor of a model's files."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore_megatron.families.weight_source import HfTensor, Source
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.weights.parameter_rows import largest_share, row_ranges, rows_of, source_shape, tensor_rank_and_size


@given(
    num_groups=st.sampled_from([2, 4, 6]), per_group=st.integers(1, 3), size=st.sampled_from([1, 2]), width=st.integers(1, 3)
)
def test_queries_keys_and_values_of_a_group_lie_together(num_groups: int, per_group: int, size: int, width: int) -> None:
    """As Megatron orders them (its `linear_qkv`): of each query group its queries, its key and its value."""
    lengths = {"q": num_groups * per_group * 2, "k": num_groups * 2, "v": num_groups * 2}
    tensors = {name: torch.randn(length, width) for name, length in lengths.items()}
    groups = [[tensor.chunk(num_groups)[group] for tensor in tensors.values()] for group in range(num_groups)]
    source = Source(
        parameter="linear_qkv.weight",
        tensors=tuple(HfTensor(name=name, shape=tuple(tensor.shape), tp_dim=0) for name, tensor in tensors.items()),
        groups=num_groups,
    )
    for rank in range(size):
        mine = groups[rank * num_groups // size : (rank + 1) * num_groups // size]
        parameter = torch.cat([part for group in mine for part in group])
        assert source_shape(source, size) == tuple(parameter.shape)
        for rows, tensor in zip(rows_of(parameter, source, rank, size), tensors.values(), strict=True):
            assert torch.equal(rows.flatten(0, 1), tensor.chunk(size)[rank])


@given(num_groups=st.integers(1, 3), per_group=st.integers(1, 4), sharers=st.sampled_from([2, 3, 4]), width=st.integers(1, 3))
def test_ranks_that_share_a_group_have_runs_of_its_rows(num_groups: int, per_group: int, sharers: int, width: int) -> None:
    """As Megatron cuts them, wherever a head ends: the matrix of all groups into equal parts."""
    head, size = 6, num_groups * sharers
    lengths = {"q": num_groups * per_group * head, "k": num_groups * head, "v": num_groups * head}
    if sum(lengths.values()) % size:
        return
    tensors = {name: torch.randn(length, width) for name, length in lengths.items()}
    whole = torch.cat([tensor.chunk(num_groups)[group] for group in range(num_groups) for tensor in tensors.values()])
    source = Source(
        parameter="linear_qkv.weight",
        tensors=tuple(HfTensor(name=name, shape=tuple(tensor.shape), tp_dim=0) for name, tensor in tensors.items()),
        groups=num_groups,
    )
    assert source.splits_groups(size)
    found: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    for rank, parameter in enumerate(whole.chunk(size)):
        assert source_shape(source, size) == tuple(parameter.shape)
        views, ranges = rows_of(parameter, source, rank, size), row_ranges(source, rank, size)
        for index, (name, tensor) in enumerate(tensors.items()):
            assert torch.equal(views[index].flatten(0, 1), tensor[ranges[index]])
            assert len(views[index][0]) <= largest_share(source, index, size)[0]
            found[name].append(views[index].flatten(0, 1))
    for name, parts in found.items():
        assert torch.equal(torch.cat(parts), tensors[name])


@pytest.mark.parametrize("size", [1, 2])
def test_gates_come_before_columns_on_each_rank(size: int) -> None:
    gate, up = torch.randn(4, 3), torch.randn(4, 3)
    names = (HfTensor(name="gate", shape=(4, 3), tp_dim=0), HfTensor(name="up", shape=(4, 3), tp_dim=0))
    source = Source(parameter="linear_fc1.weight", tensors=names)
    for rank in range(size):
        parts = gate.chunk(size)[rank], up.chunk(size)[rank]
        parameter = torch.cat(parts)
        found = rows_of(parameter, source, rank, size)
        assert all(torch.equal(rows.flatten(0, 1), part) for rows, part in zip(found, parts, strict=True))
        found[1].zero_()
        assert not parameter[len(parts[0]) :].any(), "they are views"


def test_what_is_divided_by_columns_has_all_rows() -> None:
    source = Source(parameter="linear_proj.weight", tensors=(HfTensor(name="o", shape=(4, 6), tp_dim=1),))
    assert source_shape(source, 2) == (4, 3)
    norm = Source(parameter="norm", tensors=(HfTensor(name="norm", shape=(4,)),))
    assert source_shape(norm, 2) == (4,)


def test_experts_are_divided_among_ranks_of_their_own() -> None:
    layout = ParallelLayout(rank=3, tensor=4, expert_tensor=2)
    dense = Source(parameter="x", tensors=())
    assert tensor_rank_and_size(dense, layout) == (3, 4)
    assert tensor_rank_and_size(Source(parameter="x", tensors=(), expert=1), layout) == (layout.expert_tensor_rank, 2)

"""What each tensor rank computes, from every rank's place in turn: together it is what the whole module computes.

What the ranks exchange is compared in test_layout.
"""

import copy

import pytest
import torch
from fake_ranks import on_rank
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import parallelize_module
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from rlcore.spi import ModelSpec
from rlcore_fsdp2.sharding import local
from rlcore_fsdp2.tensor_parallel import (
    Colwise,
    Exchange,
    Experts,
    Replicated,
    Rowwise,
    SharedColwise,
    Vocabulary,
    first_row,
    parallelize,
)
from rlcore_torchkit.huggingface.models import load_model

SIZES = (2, 3)


def on_every_rank(num_ranks, module, style, run):
    """What `run` makes of this rank's part of the module, for each rank."""
    found = []
    for rank in range(num_ranks):
        with on_rank(rank, num_ranks):
            mesh = init_device_mesh("cpu", (num_ranks,))
            made = style(mesh) if callable(style) else style
            found.append(run(rank, parallelize_module(copy.deepcopy(module), mesh, made, src_data_rank=None)))
    return found


def gradients_of(module, *names):
    """Those of this rank's parts; the module's own attributes are what it computes with."""
    parameters = dict(module.named_parameters())
    return [local(parameters[name].grad) for name in names]


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 8)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_columns_of_all_ranks_are_the_outputs(num_ranks, linear):
    inputs, upstream = torch.randn(5, 6), torch.randn(5, 8)
    expected = linear(inputs)
    (expected * upstream).sum().backward()

    def run(rank, part):
        output = part(inputs)
        (output * upstream.chunk(num_ranks, 1)[rank]).sum().backward()
        return output, *gradients_of(part, "weight", "bias")

    outputs, weights, biases = zip(*on_every_rank(num_ranks, linear, Colwise(), run), strict=True)
    torch.testing.assert_close(torch.cat(outputs, 1), expected)
    torch.testing.assert_close(torch.cat(weights), linear.weight.grad)
    torch.testing.assert_close(torch.cat(biases), linear.bias.grad)


def test_ranks_that_share_a_head_compute_it_each_and_their_gradients_are_added_up(linear):
    """Two heads of four rows, on four ranks."""
    inputs, upstream = torch.randn(5, 6), torch.randn(4, 5, 4)
    heads = linear(inputs).split(4, 1)
    expected = [heads[0], heads[0], heads[1], heads[1]]
    sum((head * of_rank).sum() for head, of_rank in zip(expected, upstream, strict=True)).backward()

    def run(rank, part):
        output = part(inputs)
        (output * upstream[rank]).sum().backward()
        assert all(parameter.grad.placements == (Partial(),) for parameter in part.parameters())
        return output, *gradients_of(part, "weight", "bias")

    outputs, weights, biases = zip(*on_every_rank(4, linear, SharedColwise(2), run), strict=True)
    torch.testing.assert_close(torch.stack(outputs), torch.stack(expected))
    torch.testing.assert_close(torch.stack(weights).sum(0), linear.weight.grad)
    torch.testing.assert_close(torch.stack(biases).sum(0), linear.bias.grad)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_summands_of_all_ranks_are_the_outputs_with_one_bias(num_ranks, linear):
    inputs, upstream = torch.randn(5, 6), torch.randn(5, 8)
    expected = linear(inputs)
    (expected * upstream).sum().backward()

    def run(rank, part):
        summand = part(inputs.chunk(num_ranks, 1)[rank])
        (summand * upstream).sum().backward()
        return summand, *gradients_of(part, "weight")

    summands, weights = zip(*on_every_rank(num_ranks, linear, Rowwise(), run), strict=True)
    torch.testing.assert_close(torch.stack(summands).sum(0), expected)
    torch.testing.assert_close(torch.cat(weights, 1), linear.weight.grad)


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("num_rows", [6, 7])
def test_rows_of_all_ranks_are_the_embedding(num_rows, num_ranks):
    embedding, tokens = nn.Embedding(num_rows, 4), torch.arange(num_rows)[None]
    style = lambda mesh: Vocabulary(Exchange(mesh=mesh, sequence_parallel=False))  # noqa: E731
    summands = on_every_rank(num_ranks, embedding, style, lambda rank, part: part(tokens))
    assert torch.equal(torch.stack(summands).sum(0), embedding(tokens))


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("num_rows", [1, 2, 6, 7, 100])
def test_the_first_row_is_that_of_torchs_chunks(num_rows, num_ranks):
    chunks = torch.arange(num_rows).chunk(num_ranks)
    for rank in range(num_ranks):
        with on_rank(rank, num_ranks):
            found = first_row(num_rows, init_device_mesh("cpu", (num_ranks,)))
        assert found == (chunks[rank][0] if rank < len(chunks) else num_rows)


def test_experts_of_all_ranks_add_up():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(hidden_size=6, moe_intermediate_size=4, num_experts=4, num_experts_per_tok=2)
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    states = torch.randn(9, 6)
    weights, chosen = torch.rand(9, 4).topk(2)
    summands = on_every_rank(2, experts, Experts(), lambda rank, part: part(states, chosen, weights))
    torch.testing.assert_close(torch.stack(summands).sum(0), experts(states, chosen, weights), atol=1e-5, rtol=1e-4)


def test_what_is_on_every_rank_is_whole_there():
    norm = nn.LayerNorm(6, bias=False)
    nn.init.normal_(norm.weight)
    inputs = torch.randn(5, 6)
    for output in on_every_rank(2, norm, Replicated(summed=True), lambda rank, part: part(inputs)):
        torch.testing.assert_close(output, norm(inputs))


@pytest.mark.parametrize(("num_tokens", "num_own"), [(6, 3), (5, 3), (1, 1)])
def test_tokens_are_padded_until_ranks_have_equally_many(num_tokens, num_own):
    with on_rank(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        own = Exchange(mesh=mesh, sequence_parallel=True).leave(torch.ones(1, num_tokens, 4))
        assert own.shape == (1, num_own, 4)
        assert Exchange(mesh=mesh, sequence_parallel=True).enter(own).shape == (1, 2 * num_own, 4)
        whole = Exchange(mesh=mesh, sequence_parallel=False).leave(torch.ones(1, num_tokens, 4))
        assert whole.shape == (1, num_tokens, 4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_divided_model_has_the_parameters_of_the_whole_under_their_names(tied, model_directory):
    spec = ModelSpec(path=str(model_directory("qwen3_moe", tied)))
    whole = dict(load_model(spec, dtype=torch.float32).named_parameters())
    found = []
    for rank in range(2):
        with on_rank(rank, 2):
            model = load_model(spec, dtype=torch.float32)
            parallelize(model, init_device_mesh("cpu", (2,)), sequence_parallel=True, experts=True)
            found.append({name: local(parameter.detach()) for name, parameter in model.named_parameters()})
    assert found[0].keys() == whole.keys()
    for name, parameter in whole.items():
        parts = [rank[name] for rank in found]
        if parts[0].shape == parameter.shape:
            assert all(torch.equal(part, parameter) for part in parts), name
            assert "norm" in name or "gate.weight" in name
        else:
            dim = next(dim for dim, size in enumerate(parts[0].shape) if size != parameter.shape[dim])
            assert torch.equal(torch.cat(parts, dim), parameter), name

"""What each rank of an expert group does in the tests of test_experts."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsdp2_group_cases import Cases, Place, assert_close_everywhere, quickly
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import ContractError
from rlcore_fsdp2.experts import divide_experts

CASES = Cases()
HIDDEN = 16
NUM_EXPERTS = 8
TOP_K = 2


def make_block(num_experts: int = NUM_EXPERTS, intermediate: int = 12) -> Any:
    """A causal language model with one mixture-of-experts layer."""
    options = {"vocab_size": 32, "hidden_size": HIDDEN, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    options |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": num_experts, "norm_topk_prob": True}
    options |= {"num_experts_per_tok": TOP_K, "moe_intermediate_size": intermediate, "initializer_range": 0.4}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **options))


def experts_mesh(place: Place) -> DeviceMesh:
    return init_device_mesh("cpu", (place.num_ranks,), mesh_dim_names=("expert",))


def divided(model: nn.Module, mesh: DeviceMesh) -> Any:
    divide_experts(model, mesh)
    return model


def full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def summed(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


@CASES.add
def experts_equal_the_dense_computation(place: Place) -> None:
    """Any routing: experts without a token, ranks that receive none, ranks that have none to send."""
    model = make_block()
    dense = copy.deepcopy(model.model.layers[0].mlp.experts)
    own = divided(model, experts_mesh(place)).model.layers[0].mlp.experts
    choices = st.sampled_from([range(NUM_EXPERTS), range(2), range(NUM_EXPERTS - 2, NUM_EXPERTS), (0, 3, 4)])

    @quickly
    @given(st.lists(st.integers(0, 5), min_size=place.num_ranks, max_size=place.num_ranks), choices, st.integers(0, 9))
    def check(num_tokens: list[int], allowed: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)
        total, begin = sum(num_tokens), sum(num_tokens[: place.rank])
        rows = slice(begin, begin + num_tokens[place.rank])
        states, upstream = (torch.from_numpy(rng.normal(size=(total, HIDDEN)).astype(np.float32)) for _ in range(2))
        index = np.array([rng.choice(list(allowed), TOP_K, replace=False) for _ in range(total)], np.int64).reshape(
            total, TOP_K
        )
        index, weights = torch.from_numpy(index), torch.from_numpy(rng.random((total, TOP_K)).astype(np.float32))
        results = []
        for module, share in ((dense, slice(None)), (own, rows)):
            module.zero_grad()
            inputs = states[share].clone().requires_grad_(), weights[share].clone().requires_grad_()
            output = module(inputs[0], index[share], inputs[1])
            (output * upstream[share]).sum().backward()
            results.append((output, inputs[0].grad, inputs[1].grad))
        names = ("output", "gradient of the states", "gradient of the weights")
        pairs = [(name, found, expected[rows]) for name, expected, found in zip(names, *results, strict=True)]
        for (name, found), expected in zip(own.named_parameters(), dense.parameters(), strict=True):
            wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad
            pairs.append((name, full(found.grad), wanted))
        assert_close_everywhere(pairs)

    check()


@CASES.add
def router_and_inputs_get_exact_gradients(place: Place) -> None:
    model = make_block()
    dense = copy.deepcopy(model.model.layers[0].mlp)
    own = divided(model, experts_mesh(place)).model.layers[0].mlp
    generator = torch.Generator().manual_seed(1)
    states, upstream = (torch.randn(place.num_ranks, 7, HIDDEN, generator=generator) for _ in range(2))
    whole, part = states.clone().requires_grad_(), states[[place.rank]].clone().requires_grad_()
    (dense(whole) * upstream).sum().backward()
    (own(part) * upstream[[place.rank]]).sum().backward()
    pairs = [("states", part.grad, whole.grad[[place.rank]])]
    pairs.append(("router", summed(own.gate.weight.grad), dense.gate.weight.grad))
    assert_close_everywhere(pairs)


@CASES.add
def bfloat16_is_close_to_the_dense_computation(place: Place) -> None:
    """By grouped products; one rank's experts get nothing."""
    model = make_block(intermediate=16).bfloat16()
    dense = copy.deepcopy(model.model.layers[0].mlp.experts)
    own = divided(model, experts_mesh(place)).model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(3)
    states, upstream = (torch.randn(place.num_ranks, 6, HIDDEN, generator=generator).bfloat16() for _ in range(2))
    weights, index = torch.rand(place.num_ranks, 6, NUM_EXPERTS // 2, generator=generator).bfloat16().topk(TOP_K)
    part = states[place.rank].clone().requires_grad_()
    (own(part, index[place.rank], weights[place.rank]) * upstream[place.rank]).sum().backward()
    whole = states.flatten(0, 1).clone().requires_grad_()
    (dense(whole, index.flatten(0, 1), weights.flatten(0, 1)) * upstream.flatten(0, 1)).sum().backward()
    pairs = [("states", part.grad, whole.grad.view_as(states)[place.rank])]
    pairs += [(n, full(p.grad), q.grad) for (n, p), q in zip(own.named_parameters(), dense.parameters(), strict=True)]
    assert_close_everywhere(pairs, tolerance=2**-7)


@CASES.add
def tensor_ranks_share_the_tokens(place: Place) -> None:
    """Outputs and the gradients of inputs are summands; those of the experts are whole."""
    model = make_block()
    dense = copy.deepcopy(model.model.layers[0].mlp.experts)
    mesh = init_device_mesh("cpu", (place.num_ranks // 2, 2), mesh_dim_names=("expert", "tensor"))
    own = divided(model, mesh).model.layers[0].mlp.experts
    group_rank, tensor_group = mesh.get_local_rank(0), mesh.get_group(1)
    generator = torch.Generator().manual_seed(2)
    states, upstream = (torch.randn(place.num_ranks // 2, 7, HIDDEN, generator=generator) for _ in range(2))
    scores = torch.rand(place.num_ranks // 2, 7, NUM_EXPERTS, generator=generator)
    weights, index = scores.topk(TOP_K)
    whole, part = states.clone().requires_grad_(), states[group_rank].clone().requires_grad_()
    expected = dense(whole.flatten(0, 1), index.flatten(0, 1), weights.flatten(0, 1)).view_as(whole)
    (expected * upstream).sum().backward()
    found = own(part, index[group_rank], weights[group_rank])
    (found * upstream[group_rank]).sum().backward()
    pairs = []
    for name, values, wanted in (("output", found, expected), ("states", part.grad, whole.grad)):
        total = values.detach().clone()
        dist.all_reduce(total, group=tensor_group)
        pairs.append((name, total, wanted[group_rank]))
    for (name, parameter), wanted in zip(own.named_parameters(), dense.parameters(), strict=True):
        pairs.append((name, full(parameter.grad), wanted.grad))
    assert_close_everywhere(pairs)


@CASES.add
def parameters_keep_names_and_global_shapes(place: Place) -> None:
    model = make_block()
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    mesh = experts_mesh(place)
    divide_experts(model.requires_grad_(False), mesh)
    found = dict(model.named_parameters())
    assert list(found) == list(expected)
    num_divided = 0
    for name, parameter in found.items():
        assert not parameter.requires_grad
        assert torch.equal(full(parameter), expected[name])
        if isinstance(parameter, DTensor):
            num_divided += 1
            assert parameter.placements == (Shard(0),)
            assert len(parameter.to_local()) == NUM_EXPERTS // place.num_ranks
            assert parameter.to_local().untyped_storage().nbytes() == parameter.to_local().nbytes, "the rest is freed"
    assert num_divided == 2


@CASES.add
def experts_that_do_not_divide_are_refused(place: Place) -> None:
    with pytest.raises(ContractError, match=f"7 experts; .* {place.num_ranks} ranks"):
        divide_experts(make_block(num_experts=7), experts_mesh(place))

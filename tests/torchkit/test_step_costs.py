"""How long passes take: against counts by hand, and how they change with work, devices and layouts."""

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rlcore.spi import DeviceSpec, OptimizerSpec
from rlcore_plan.devices import DEVICES
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.trainer.step_costs import (
    FLOAT8_LAUNCHES,
    FLOAT8_PRODUCTS,
    LAUNCHES,
    PRODUCTS,
    Layout,
    Tokens,
    active_parameters,
    attention_flops,
    float8_parameters,
    num_microbatches,
    num_parameters,
    pass_seconds,
    refit_seconds,
    state_bytes,
    update_seconds,
)

DENSE = ModelDims.of(
    {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
)
EXPERTS = ModelDims.of(
    {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    }
)
assert DENSE is not None
assert EXPERTS is not None
DEVICE = DeviceSpec(
    name="one",
    memory_bytes=80 * 2**30,
    flops=1e15,
    bandwidth=4e12,
    link=4e11,
    network=5e10,
    host=4e10,
    devices_per_node=8,
)
TOKENS = Tokens(number=1e6, squared=1e9, longest=4096, per_microbatch=8192)


def test_parameters_are_those_of_the_models() -> None:
    assert num_parameters(DENSE) == pytest.approx(8.03e9, rel=1e-3)
    assert num_parameters(EXPERTS) == pytest.approx(30.5e9, rel=5e-3)
    assert active_parameters(EXPERTS) == pytest.approx(3.04e9, rel=5e-3)


def test_attention_counts_the_causal_half() -> None:
    # Two products of heads x width by length squared, of which half; 2 operations each.
    assert attention_flops(DENSE, 100.0**2) == 32 * 2 * 2 * 32 * 128 * 100**2 / 2


def test_a_pass_takes_at_least_its_products() -> None:
    products = 2 * active_parameters(DENSE) * TOKENS.number / DEVICE.flops / PRODUCTS
    forward = pass_seconds(DENSE, DEVICE, TOKENS, Layout(), trains=False)
    trained = pass_seconds(DENSE, DEVICE, TOKENS, Layout(), trains=True)
    recomputed = pass_seconds(DENSE, DEVICE, TOKENS, Layout(), trains=True, recomputes=True)
    assert products < forward < 1.5 * products
    assert 2.9 * forward < trained < 3.6 * forward
    assert trained < recomputed < 1.4 * trained


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_more_ranks_are_never_slower_than_fewer_and_never_better_than_even(data: int, tensor: int, context: int) -> None:
    tokens = evolve(TOKENS, number=1e8, squared=1e11)
    one = pass_seconds(DENSE, DEVICE, tokens, Layout(), trains=True)
    layout = Layout(data=data, tensor=tensor, context=context)
    many = pass_seconds(DENSE, DEVICE, tokens, layout, trains=True)
    assert one / (data * tensor * context) <= many * (1 + 1e-9)
    assert many <= one * (1 + 1e-9)


def test_machines_between_ranks_cost_time() -> None:
    tokens = evolve(TOKENS, per_microbatch=10**6)
    for layout in (Layout(tensor=8), Layout(data=8, expert=8), Layout(context=8)):
        name = next(name for name in ("tensor", "expert", "context") if getattr(layout, name) > 1)
        far = evolve(layout, crosses_nodes=frozenset({name}))
        near, apart = (pass_seconds(EXPERTS, DEVICE, tokens, one, trains=True) for one in (layout, far))
        assert near < apart
    near, apart = (update_seconds(DEVICE, Layout(data=8, crosses_nodes=frozenset(names)), 1e9, 1e9) for names in ([], ["data"]))
    assert near < apart


def test_launches_bound_small_microbatches_of_experts() -> None:
    small, large = (evolve(TOKENS, number=1e5, squared=1e7, longest=1.0, per_microbatch=size) for size in (1024, 8192))
    layout = Layout(data=4, expert=4)
    few, many = (pass_seconds(EXPERTS, DEVICE, tokens, layout, trains=True) for tokens in (large, small))
    assert many == pytest.approx(few * num_microbatches(small, layout) / num_microbatches(large, layout), rel=0.01)


def test_one_kernel_for_all_experts_of_a_layer() -> None:
    """As measured: four layers with all experts on one H200, an update of four microbatches (docs/benchmarks.md)."""
    assert EXPERTS is not None
    four = evolve(EXPERTS, num_layers=4, has_experts=EXPERTS.has_experts[:4])
    tokens = evolve(TOKENS, number=4 * 8192.0, squared=4 * 8 * 1024.0**2, longest=1024.0)
    assert pass_seconds(four, DEVICES["H200"], tokens, Layout(), trains=True) == pytest.approx(0.60, rel=0.15)
    few = evolve(tokens, number=1024.0, squared=1024.0**2, per_microbatch=1024)
    shared, own = (pass_seconds(four, DEVICES[name], few, Layout(), trains=False) for name in ("H200", "GB200"))
    assert own > 4 * shared


def test_stages_wait_for_each_other() -> None:
    tokens = evolve(TOKENS, number=8192.0 * 8, squared=1e6)
    one, four = (pass_seconds(DENSE, DEVICE, tokens, Layout(pipeline=stages), trains=True) for stages in (1, 4))
    assert four > one / 4 * (1 + 3 / 8)


def test_a_refit_follows_the_number_of_tensors() -> None:
    dense, experts = (refit_seconds(dims, DEVICE, travels=False) for dims in (DENSE, EXPERTS))
    assert dense < 0.2 < 0.9 < experts
    within, between = (refit_seconds(DENSE, DEVICE, travels=True, crosses_nodes=crosses) for crosses in (False, True))
    assert dense < within < between


H100, H200 = DEVICES["H100"], DEVICES["H200"]
SMALL = ModelDims.of(
    {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
)
REFITS = {
    "1.5B by CUDA IPC": (SMALL, H100, False, 0.071),
    "8B by CUDA IPC": (DENSE, H100, False, 0.145),
    "30B-A3B by CUDA IPC": (EXPERTS, H200, False, 0.97),
    "8B gathered, from one H200 to another": (DENSE, H200, True, 0.167),
    "1.5B by NCCL, in a step": (SMALL, H200, True, 0.11),
}
"""Seconds of docs/benchmarks.md: its sections of refits, and the headline work."""


@pytest.mark.parametrize("name", REFITS)
def test_refits_take_about_what_was_measured(name: str) -> None:
    dims, device, travels, measured = REFITS[name]
    assert dims is not None
    assert refit_seconds(dims, device, travels=travels) == pytest.approx(measured, rel=0.4)


NARROW = evolve(DEVICE, float8_flops=4e15)


def test_products_of_8_bits_are_those_of_layers_without_head_routers_and_attention() -> None:
    assert float8_parameters(DENSE, Layout(float8="all")) == active_parameters(DENSE) - 128256 * 4096
    assert float8_parameters(DENSE, Layout()) == 0.0
    experts = 48 * 8 * 3 * 2048 * 768
    assert float8_parameters(EXPERTS, Layout(float8="all")) == active_parameters(EXPERTS) - 151936 * 2048 - 48 * 2048 * 128
    assert (
        float8_parameters(EXPERTS, Layout(float8="without experts"))
        == float8_parameters(EXPERTS, Layout(float8="all")) - experts
    )


@pytest.mark.parametrize("trains", [False, True])
def test_products_of_8_bits_take_their_own_share_of_their_own_peak(trains: bool) -> None:
    """What else a pass takes is the same; on devices without such a peak nothing is gained."""
    tokens = evolve(TOKENS, per_microbatch=65536)  # so many that no pass waits for its kernels' launches
    whole, narrow = (pass_seconds(DENSE, NARROW, tokens, Layout(float8=kind), trains=trains) for kind in ("none", "all"))
    flops = 2 * float8_parameters(DENSE, Layout(float8="all")) * TOKENS.number * (3 if trains else 1)
    saved = flops * (1 / PRODUCTS / NARROW.flops - 1 / FLOAT8_PRODUCTS / 4e15)
    assert whole - narrow == pytest.approx(saved)
    assert pass_seconds(DENSE, DEVICE, tokens, Layout(float8="all"), trains=trains) == whole


def test_layers_that_stay_wide_and_gradients_of_weights_are_left_out() -> None:
    tokens = evolve(TOKENS, per_microbatch=65536)
    layout = Layout(float8="all")
    none, all_of_it, wide, without_gradients = (
        pass_seconds(DENSE, NARROW, tokens, changed, trains=True)
        for changed in (
            Layout(),
            layout,
            evolve(layout, wide_layers=(1, 3)),
            evolve(layout, float8_weight_gradients=False),
        )
    )
    saved = none - all_of_it
    assert none - wide == pytest.approx(saved * (DENSE.num_layers - 4) / DENSE.num_layers)
    assert none - without_gradients == pytest.approx(saved * 2 / 3)
    forward = [
        pass_seconds(DENSE, NARROW, tokens, evolve(layout, float8_weight_gradients=said), trains=False)
        for said in (True, False)
    ]
    assert forward[0] == forward[1], "a forward pass makes none"
    assert float8_parameters(EXPERTS, evolve(layout, wide_layers=(24, 24))) == 0.0
    assert float8_parameters(EXPERTS, evolve(layout, wide_layers=(40, 40))) == 0.0


def test_small_layers_wait_for_the_kernels_that_round() -> None:
    """Where launches bound a pass, 8 bits make it longer."""
    small = Tokens(number=64, squared=64.0, longest=1, per_microbatch=1)
    plain, narrow = (pass_seconds(DENSE, NARROW, small, Layout(float8=kind), trains=True) for kind in ("none", "all"))
    assert narrow / plain == pytest.approx((LAUNCHES + FLOAT8_LAUNCHES) / LAUNCHES)


@pytest.mark.parametrize(
    ("spec", "of_layers", "of_others"),
    [
        (OptimizerSpec(), 8, 8),
        (OptimizerSpec(moments="8bit"), 2.03125, 2.03125),
        (OptimizerSpec(name="muon"), 4, 8),
        (OptimizerSpec(name="muon", moments="8bit"), 4, 2.03125),
    ],
)
def test_state_is_of_two_moments_or_of_one_mean(spec, of_layers, of_others):
    """Of Llama 3 8B: 32 layers of attention and an MLP, an embedding and a head."""
    in_layers = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    others = 2 * 128256 * 4096
    assert state_bytes(spec, DENSE) == pytest.approx(of_layers * in_layers + of_others * others)
    assert state_bytes(spec, DENSE, 1e6) == pytest.approx(of_others * 1e6)

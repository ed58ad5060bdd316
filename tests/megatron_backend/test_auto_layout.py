"""What "auto" chooses: sizes that divide and fit, no more of them than there has to be, and the reason in a sentence."""

from math import prod

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_shapes import AUTO, EXPERTS, GIB, LARGE, MIDDLE, ONE, SMALL, load_of

from rlcore.spi import ConfigError
from rlcore_megatron.layouts.auto_layout import choose
from rlcore_megatron.layouts.layout import ParallelLayout
from rlcore_megatron.layouts.layout_check import AUTO_SIZES, layout_problems
from rlcore_megatron.layouts.memory import USABLE, Workload, estimate
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.architectures.dims import ModelDims

MODELS = {"small": SMALL, "middle": MIDDLE, "large": LARGE, "experts": EXPERTS}
configs = st.builds(
    lambda fixed, recompute: evolve(AUTO, recompute=recompute, **fixed),
    st.dictionaries(st.sampled_from(AUTO_SIZES), st.sampled_from([1, 2, 4]), max_size=2),
    st.sampled_from(["none", "selective", "full"]),
)
loads = st.builds(
    Workload,
    world_size=st.sampled_from([1, 2, 4, 6, 8, 16, 32, 64]),
    model=st.sampled_from(list(MODELS.values())),
    device=st.just("cuda"),
    max_sequence_length=st.sampled_from([512, 8192, 65536]),
    max_microbatch_tokens=st.sampled_from([None, 1024, 16384]),
    memory_bytes=st.integers(8, 200).map(lambda size: size * GIB),
    local_size=st.sampled_from([1, 4, 8]),
)
loads = st.tuples(loads, st.booleans()).map(lambda drawn: evolve(drawn[0], reference=drawn[0].model if drawn[1] else None))


def sizes_of(config: MegatronConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in AUTO_SIZES if getattr(config, name) != 1}


def num_shared(config: MegatronConfig) -> int:
    return prod(getattr(config, name) for name in AUTO_SIZES if name != "expert_parallel")


def attempt(config: MegatronConfig, load: Workload) -> MegatronConfig | None:
    try:
        return choose(config, load).config
    except ConfigError:
        return None


@given(config=configs, load=loads)
@settings(max_examples=150, deadline=None)
def test_what_is_chosen_divides_and_fits_and_keeps_what_was_set(config: MegatronConfig, load: Workload) -> None:
    chosen = attempt(config, load)
    if chosen is None:
        return
    assert layout_problems(chosen, load.world_size, "cuda", load.model) == []
    for name in AUTO_SIZES:
        assert getattr(config, name) in ("auto", getattr(chosen, name))
    if config.tensor_parallel == "auto":
        assert load.local_size % chosen.tensor_parallel == 0 or load.world_size % chosen.tensor_parallel == 0
        assert chosen.tensor_parallel <= load.local_size
    if any(getattr(config, name) == "auto" for name in AUTO_SIZES):
        dims = ModelDims.of(load.model)
        assert estimate(dims, chosen, load).total <= USABLE * load.memory_bytes


@given(config=configs, load=loads, more=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_more_memory_never_gives_more_parallelism(config: MegatronConfig, load: Workload, more: int) -> None:
    chosen = attempt(config, load)
    with_more = attempt(config, evolve(load, memory_bytes=load.memory_bytes + more * GIB))
    if chosen is not None:
        assert with_more is not None
        assert num_shared(with_more) <= num_shared(chosen)
        if num_shared(with_more) == num_shared(chosen):
            cost = [
                (c.pipeline_parallel, c.context_parallel, c.tensor_parallel, c.expert_parallel) for c in (with_more, chosen)
            ]
            assert cost[0] <= cost[1]


@given(load=loads, config=configs)
@settings(max_examples=50, deadline=None)
def test_what_fits_one_rank_divides_nothing(load: Workload, config: MegatronConfig) -> None:
    vast = evolve(load, memory_bytes=10**6 * GIB)
    fixed = evolve(ONE, **{name: size for name in AUTO_SIZES if (size := getattr(config, name)) != "auto"})
    if not layout_problems(fixed, load.world_size, "cuda", load.model):
        assert choose(config, vast).config == evolve(config, **{name: getattr(fixed, name) for name in AUTO_SIZES})


@pytest.mark.parametrize(
    ("model", "world_size", "memory", "options", "sizes"),
    [
        ("small", 1, 80, {}, {}),
        ("middle", 8, 140, {}, {}),
        ("middle", 8, 80, {}, {"tensor_parallel": 2}),
        ("middle", 8, 140, {"max_sequence_length": 65536}, {"tensor_parallel": 4}),
        ("small", 8, 80, {"max_sequence_length": 65536}, {"tensor_parallel": 2, "context_parallel": 2}),
        ("large", 32, 80, {}, {"tensor_parallel": 8, "context_parallel": 2, "pipeline_parallel": 2}),
        ("experts", 32, 140, {}, {"expert_parallel": 8}),
        # No tensor ranks over machines of one GPU.
        ("middle", 8, 80, {"local_size": 1}, {"context_parallel": 4}),
        # A machine of six: four would straddle two of them.
        ("middle", 12, 60, {"local_size": 6}, {"tensor_parallel": 2}),
    ],
)
def test_layouts_of_known_models(model: str, world_size: int, memory: int, options: dict, sizes: dict) -> None:
    load = load_of(MODELS[model], world_size, memory, **options)
    assert sizes_of(choose(AUTO, load).config) == sizes


def test_the_reason_is_a_sentence_with_what_it_saves() -> None:
    layout = ParallelLayout.of(AUTO, 5, 8, MIDDLE, "cuda", 8192, memory_bytes=80 * GIB)
    assert (layout.tensor, layout.data, layout.rank) == (2, 4, 5)
    assert layout.reason == (
        "tensor_parallel 2: 54.0 GiB a GPU instead of 95.2 GiB, of 80.0 GiB "
        "(weights 7.5 GiB, gradients 15.0 GiB, optimizer 11.2 GiB, activations 18.8 GiB, logits 1.5 GiB)"
    )
    alone = choose(AUTO, load_of(SMALL, 1))
    names = "tensor_parallel = expert_parallel = context_parallel = pipeline_parallel = 1"
    assert alone.reason.startswith(f"{names}: 44.4 GiB a GPU, of 80.0 GiB (weights 2.9 GiB")


def test_without_knowing_the_memory_the_smallest_that_divide_are_taken() -> None:
    unknown = choose(evolve(AUTO, virtual_pipeline_parallel=2), load_of(MIDDLE, 8, None))
    assert sizes_of(unknown.config) == {"pipeline_parallel": 2}
    assert unknown.reason == "pipeline_parallel 2: the smallest sizes that divide; whether it fits is not known"


def test_sizes_that_are_all_numbers_are_left_alone() -> None:
    config = evolve(ONE, tensor_parallel=2)
    choice = choose(config, load_of(LARGE, 2, 1))
    assert (choice.config, choice.reason) == (config, "")


def too_large(config: MegatronConfig, load: Workload) -> str:
    with pytest.raises(ConfigError) as raised:
        choose(config, load)
    (problem,) = raised.value.problems
    return str(problem)


def test_what_fits_nowhere_says_how_much_it_needs() -> None:
    assert too_large(AUTO, load_of(LARGE, 8)) == (
        "trainer.megatron: found 171.4 GiB a GPU in the layout that needs least, tensor_parallel 8 (weights 16.4 GiB, "
        "gradients 32.9 GiB, optimizer 98.6 GiB, activations 22.6 GiB, logits 1.0 GiB); expected at most 70.4 GiB, which can "
        "be planned with of 80.0 GiB. Give the trainer more GPUs. Sizes that are set to numbers are taken without this estimate"
    )


@pytest.mark.parametrize(
    ("load", "remedy"),
    [
        (load_of(SMALL, 1, 80, max_sequence_length=65536), 'Set trainer.megatron.recompute to "full"'),
        (
            load_of(SMALL, 1, 40, max_sequence_length=1024, max_microbatch_tokens=2**18),
            "Lower training.max_tokens_per_microbatch",
        ),
        (
            load_of(SMALL, 1, 40, max_sequence_length=2**18),
            "Lower rollout.max_prompt_tokens or rollout.max_response_tokens, or give the trainer more GPUs",
        ),
        (load_of(MIDDLE, 1), "Give the trainer more GPUs"),
    ],
)
def test_the_remedy_is_one_that_would_do(load: Workload, remedy: str) -> None:
    assert f"GiB. {remedy}. Sizes" in too_large(AUTO, load)


def test_sizes_that_nothing_goes_with_are_named() -> None:
    assert too_large(evolve(AUTO, virtual_pipeline_parallel=2), load_of(MIDDLE, 1)) == (
        'trainer.megatron: found virtual_pipeline_parallel 2 on 1 rank(s), which no sizes in place of "auto" go with; expected '
        "sizes that divide ranks, heads, experts and vocabulary, and no more stages than layers. Change these, or give the "
        "trainer another number of ranks"
    )


def test_a_reference_of_another_size_is_divided_too() -> None:
    """Its twelve heads go on four ranks at most, whatever the policy's would allow; and its weights need room."""
    load = Workload(world_size=16, model=MIDDLE, device="cuda", max_sequence_length=8192, memory_bytes=28 * GIB)
    alone, both = attempt(AUTO, load), attempt(AUTO, evolve(load, reference=SMALL))
    assert alone is not None
    assert both is not None
    assert int(alone.tensor_parallel) > 4 >= int(both.tensor_parallel)
    assert num_shared(both) >= num_shared(alone)


def test_key_heads_are_shared_where_nothing_else_may_be_divided() -> None:
    """By tensor ranks: of as many ranks, context ranks are taken first."""
    load = Workload(world_size=8, model=SMALL, device="cuda", max_sequence_length=65536, memory_bytes=80 * GIB)
    apart = attempt(AUTO, load)
    assert apart is not None
    assert apart.tensor_parallel <= SMALL["num_key_value_heads"]
    shared = attempt(evolve(AUTO, context_parallel=1, pipeline_parallel=1), load)
    assert shared is not None
    assert shared.tensor_parallel == 4 > SMALL["num_key_value_heads"]
